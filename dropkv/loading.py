"""From a checkpoint on disk to a network and a tokenizer in memory; every failure becomes one line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropkv import gguf_cache
from dropkv.checkpoints import Checkpoint
from dropkv.errors import MORE_MEMORY, ModelError, out_of_memory
from dropkv.quiet import quiet

if TYPE_CHECKING:
    import torch


NO_TOKENIZER = "{}: has no tokenizer; put tokenizer.json beside its config.json"
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
# Quantisation methods and what they need: the module to look for and the package that brings it.
PACKAGES = {
    "gptq": {"gptqmodel": "gptqmodel", "optimum": "optimum"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "auto-round": {"auto_round": "auto-round"},
    "hqq": {"hqq": "hqq"},
    "aqlm": {"aqlm": "aqlm"},
    "torchao": {"torchao": "torchao"},
    "quanto": {"optimum": "optimum-quanto"},
}


# Where models that also read images keep the weights of their text part, and what these are called in the text model alone.
TEXT_PART = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def read_config(folder: Path, gguf: str | None, name: str) -> Any:
    """The transformers config of a folder or of the GGUF in it, of a model that also reads images its text part; raises ModelError."""
    from transformers import AutoConfig

    with _naming(name), quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **_gguf(gguf))
        return text_part(config)


def text_part(config: Any) -> Any:
    """The config of the text model inside one that also reads images, where that is a causal model of its own (Gemma-3, Mistral-3)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    inner: Any = getattr(config, "text_config", None)
    if getattr(config, "vision_config", None) is None or type(inner) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    inner.tie_word_embeddings = config.tie_word_embeddings
    inner.dtype = inner.dtype or config.dtype
    if quantization(config):
        inner.quantization_config = config.quantization_config
    return inner


def require_packages(config: Any, name: str) -> None:
    """Raise ModelError when a model's weights are quantised in a way whose package is not installed."""
    method = quantization(config)
    needed = PACKAGES.get(method or "", {})
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelError(
            f"{name}: its weights are quantised ({method}), which needs a package that is missing; "
            f"run: pip install {' '.join(missing)}"
        )


def quantization(config: Any) -> str | None:
    """The method by which a checkpoint's weights are quantised, or None."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown")


def load_checkpoint(
    checkpoint: Checkpoint,
    dtype: str,
    devices: Sequence[torch.device],
    check: Callable[[Any], None],
    *,
    named: bool = True,
    note: gguf_cache.Note = gguf_cache.ignore,
) -> tuple[Any, Any]:
    """Network (evaluation mode, no gradients) and tokenizer.

    dtype: "auto" or a name of torch. devices: the one to load onto, or the GPUs to spread over; unless `named`, only as many as are needed.
    check: raises for a config that cannot be served, before weights are read. note: is told in a line when a converted copy cannot be kept.
    Raises ModelError.
    """
    device = devices[0]
    folder, gguf = checkpoint.folder, checkpoint.gguf
    notes: list[str] = []  # told when standard error can be seen again
    copy = gguf_cache.copy_folder(folder / gguf, notes.append) if gguf else None
    if copy is not None and gguf_cache.is_valid(copy):
        folder, gguf, copy = copy, None, None
    config = read_config(folder, gguf, checkpoint.id)
    check(config)
    method = quantization(config) if gguf is None else None
    with _naming(checkpoint.id, method), quiet():
        tokenizer = _tokenizer(folder, gguf, checkpoint)
        final = _dtype(dtype, config, device)
        if copy is not None:
            # Converted in float32 so that the copy is exact whatever was asked for now.
            network = _network(folder, gguf, config, _dtype("float32", config, device), {}, checkpoint.id)
            gguf_cache.store(copy, network, tokenizer, notes.append)
            network.to(device=device, dtype=final)
        else:
            place = _place(checkpoint, config, final, devices, named)
            network = _network(folder, gguf, config, final, place, checkpoint.id)
    for line in notes:
        note(line)
    return network.eval().requires_grad_(False), tokenizer


def _network(folder: Path, gguf: str | None, config: Any, dtype: torch.dtype, place: dict[str, Any], name: str) -> Any:
    from transformers import AutoModelForCausalLM

    from dropkv.attention import NAME

    network, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=NAME,
        output_loading_info=True,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # told below, in one line
        key_mapping=TEXT_PART,
        **place,
        **_gguf(gguf),
    )
    for weight, theirs, ours in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{name}: {weight} has the shape {list(theirs)} in its files, its config asks for {list(ours)}; "
            f"download config and weights together"
        )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise ModelError(
            f"{name}: its files lack {len(missing)} weights that its config asks for ({missing[0]}); "
            f"download or convert it again"
        )
    return network


def _place(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, devices: Sequence[torch.device], named: bool
) -> dict[str, Any]:
    """Arguments that put the weights onto the devices as they are read."""
    import torch

    from dropkv.devices import device_map

    if devices[0].type == "cpu":
        return {}
    if devices[0].type != "cuda":
        return {"device_map": {"": devices[0]}}
    return device_map(
        _size(checkpoint, config, dtype), devices, lambda device: torch.cuda.mem_get_info(device)[0], named=named
    )


def _size(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights once loaded; for quantised ones those of their files."""
    import torch
    from transformers import AutoModelForCausalLM

    if quantization(config) and checkpoint.gguf is None:
        return sum(file.stat().st_size for file in checkpoint.weights)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())


def _tokenizer(folder: Path, gguf: str | None, checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # For the bundled model both give the same; the automatic one parses the whole GGUF once more, which takes seconds.
    maker = PreTrainedTokenizerFast if gguf and checkpoint.source == "bundled" else AutoTokenizer
    name = checkpoint.id
    try:
        tokenizer = maker.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **_gguf(gguf))
    except Exception as error:
        if out_of_memory(error):
            raise
        if gguf is None and not any(file for pattern in TOKENIZERS for file in folder.glob(pattern)):
            raise ModelError(NO_TOKENIZER.format(name)) from error
        raise ModelError(
            f"{name}: its tokenizer cannot be loaded ({_first_line(error)}); put tokenizer.json beside its config.json"
        ) from error
    if not tokenizer or not len(tokenizer.get_vocab()):
        raise ModelError(NO_TOKENIZER.format(name))
    # Answers are shown as decoded. Older releases of transformers ignore this for BPE anyway, with a long warning at the first answer.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    import torch

    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type == "cpu":
        return torch.float32  # 16-bit arithmetic is several times slower on most CPUs
    own = getattr(config, "dtype", None)
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16


def _gguf(name: str | None) -> dict[str, str]:
    return {"gguf_file": name} if name else {}


@contextmanager
def _naming(name: str, quantized: str | None = None) -> Iterator[None]:
    """Turn whatever transformers raises into one line that names the model."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise ModelError(
                f"{name}: does not fit into the GPU's memory; use --device cpu or a smaller model"
            ) from error
        if out_of_memory(error):
            raise ModelError(f"{name}: does not fit into memory; {MORE_MEMORY}") from error
        if quantized is not None:
            raise ModelError(
                f"{name}: its quantised weights ({quantized}) cannot be loaded here ({_first_line(error)}); "
                f"many kinds need a GPU, use a copy that is not quantised"
            ) from error
        if isinstance(error, ImportError):
            raise ModelError(
                f"{name}: a package is missing ({_first_line(error)}); for GGUF: pip install gguf accelerate"
            ) from error
        raise ModelError(
            f"{name}: cannot be loaded ({_first_line(error)}); check that its files are complete and the "
            f"model decoder-only"
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def load_empty(
    checkpoint: Checkpoint, dtype: str, device: torch.device, check: Callable[[Any], None]
) -> tuple[Any, Any]:
    """Network without weights, on torch's meta device in the dtype it would have on `device`, and tokenizer. Raises ModelError."""
    import torch
    from transformers import AutoModelForCausalLM

    from dropkv.attention import NAME

    folder, gguf = checkpoint.folder, checkpoint.gguf
    copy = gguf_cache.copy_folder(folder / gguf) if gguf else None
    if copy is not None and gguf_cache.is_valid(copy):
        folder, gguf = copy, None
    config = read_config(folder, gguf, checkpoint.id)
    check(config)
    with _naming(checkpoint.id), quiet(), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(
            config, dtype=_dtype(dtype, config, device), attn_implementation=NAME, trust_remote_code=False
        )
    with _naming(checkpoint.id), quiet():
        return network, _tokenizer(folder, gguf, checkpoint)
