"""Loading a model: by alias, Hub id, folder or GGUF; what cannot be served is refused by name with the reason."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dropkv.checkpoints import BUNDLED, CatalogueRow, Checkpoint, Source, catalogue, find_checkpoint
from dropkv.errors import ModelError, UsageError
from dropkv.rope import BY_LENGTH, FIXED, Regime, regime_of, rope_of, rope_types

if TYPE_CHECKING:
    import torch

__all__ = [
    "CatalogueRow",
    "LayerGeometry",
    "Model",
    "catalogue",
    "load_model",
    "load_outline",
    "refuse_unsupported",
    "wrap_model",
]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
REFUSED = {  # families whose config alone does not tell; loading catches others by a test run
    "gpt_oss": "its attention has sinks",
    "llama4": "its attention works in chunks",
    "llama4_text": "its attention works in chunks",
    "mamba": "it has state-space layers, no attention",
    "mamba2": "it has state-space layers, no attention",
    "falcon_mamba": "it has state-space layers, no attention",
    "rwkv": "it has recurrent layers, no attention",
    "recurrent_gemma": "it has recurrent layers",
}
UNROTATED_FULL = ("cohere2", "exaone4", "exaone_moe", "afmoe")  # families that rotate in their sliding layers alone
GGUF_TWINS = {"mistral": "llama"}  # GGUF calls the former the latter; the computation is the same
TESTED = ("llama", "mistral", "qwen2", "qwen3")  # need no test run when they are loaded


@dataclass(frozen=True)
class LayerGeometry:
    """Shape of one layer's attention: head counts, dimension of keys and values per head, tokens of a sliding window."""

    kind: Literal["full", "sliding"]
    query_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    window: int | None


@dataclass
class Model:
    """A network ready for dropkv, with its tokenizer.

    device: where token ids go in; a layer's entries live on its own of `devices`. max_positions: tokens of context.
    weights: the files the weights came from, empty for networks made in memory.
    """

    network: Any
    tokenizer: Any
    id: str
    source: Source
    revision: str | None
    device: torch.device
    dtype: torch.dtype
    geometry: tuple[LayerGeometry, ...]
    max_positions: int
    stop_ids: frozenset[int]
    rope: dict[str, Any]
    weights: tuple[Path, ...] = field(default=(), repr=False)
    layer_devices: tuple[torch.device, ...] = field(default=(), repr=False)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where each layer computes and its entries live."""
        return self.layer_devices or (self.device,) * len(self.geometry)

    def regime(self, tokens: int) -> Regime:
        """The RoPE regime of a document of so many tokens: its questions and answers must not leave it."""
        return regime_of(self.rope, self.max_positions, tokens)


def load_model(
    name: str | os.PathLike[str] = BUNDLED,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    note: Callable[[str], None] = lambda text: None,
) -> Model:
    """Load the model called `name` (alias, Hub id, folder, GGUF file) in evaluation mode.

    dtype "auto": float32 on a CPU, on CUDA the checkpoint's own 16-bit type or bfloat16. device "auto": the first GPU if
    the weights leave room on it, else spread over all GPUs with the rest in host memory; without a GPU the CPU.
    "cuda:0,cuda:1" spreads over these. note: is told in one line what a user should know beside the result.

    Raises ModelError when it cannot be found, loaded or served, UsageError for an unknown dtype or device.
    """
    name = _name(name)
    wanted = dtype_named(dtype)
    places = devices_named(device)
    from dropkv import attention
    from dropkv.loading import load_checkpoint, read_config, require_packages

    def check(config: Any) -> None:
        refuse_unsupported(config)
        require_packages(config, name)

    checkpoint = find_checkpoint(name, revision, lambda folder: check(read_config(folder, None, name)))
    attention.register()
    network, tokenizer = load_checkpoint(checkpoint, wanted, places, check, named=device != "auto", note=note)
    return _finish(network, tokenizer, checkpoint)


def load_outline(
    name: str = BUNDLED, *, revision: str | None = None, dtype: str = "auto", device: str = "auto"
) -> Model:
    """A model without its weights, for estimates: its network has shapes and no numbers (torch's meta device) and cannot run.

    Arguments as for `load_model`. Of a Hub model that is not here, only configuration and tokenizer are fetched. Raises ModelError,
    UsageError.
    """
    wanted, place = dtype_named(dtype), devices_named(device)[0]
    from dropkv import attention
    from dropkv.loading import load_empty, read_config

    checkpoint = find_checkpoint(
        name, revision, lambda folder: refuse_unsupported(read_config(folder, None, name)), weights=False
    )
    attention.register()
    network, tokenizer = load_empty(checkpoint, wanted, place, refuse_unsupported)
    return _model(network, tokenizer, checkpoint, place)


def wrap_model(network: Any, tokenizer: Any, *, id: str, source: Source = "folder") -> Model:
    """A model from a network and tokenizer in memory; switches the network to dropkv's attention. Raises ModelError."""
    from dropkv import attention

    refuse_unsupported(network.config)
    attention.register()
    network.set_attn_implementation(attention.NAME)
    return _finish(network, tokenizer, Checkpoint(Path(), None, id, source, None, ()))


def refuse_unsupported(config: Any) -> None:
    """Raise ModelError when a transformers config is that of a model dropkv cannot serve, with its name and the reason."""
    family = str(getattr(config, "model_type", "") or type(config).__name__)
    reason = _reason_to_refuse(config, family)
    if reason:
        raise ModelError(
            f"{family} models cannot be served: {reason}; use a decoder-only model with softmax "
            f"attention and RoPE (`dropkv models`)"
        )


def geometry_of(config: Any) -> tuple[LayerGeometry, ...]:
    """Shape of every layer from a config. A window that no text the model can read exceeds is none."""
    query_heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
    d_k = int(getattr(config, "head_dim", None) or config.hidden_size // query_heads)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False or (window and window >= config.max_position_embeddings):
        window = None
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    )
    full = LayerGeometry("full", query_heads, kv_heads, d_k, d_k, None)
    sliding = LayerGeometry("sliding", query_heads, kv_heads, d_k, d_k, int(window)) if window else full
    return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)


def unrotated_layers(config: Any) -> frozenset[int]:
    """Layers that by design have no position embeddings: what they keep is right wherever a question stands."""
    rotated = getattr(config, "no_rope_layers", None)  # 1 for layers with RoPE, in spite of its name
    if rotated is None:
        kinds = getattr(config, "layer_types", None) or ()
        apart = config.model_type in UNROTATED_FULL and getattr(config, "sliding_window", None) is not None
        rotated = [not apart or kind == "sliding_attention" for kind in kinds]
    return frozenset(index for index, turns in enumerate(rotated) if not turns)


def same_in_gguf(family: str) -> str:
    """One name for the families that a GGUF does not tell apart, the family's own for others."""
    return GGUF_TWINS.get(family, family)


def _reason_to_refuse(config: Any, family: str) -> str:
    def has(name: str) -> Any:
        return getattr(config, name, None)

    if has("is_encoder_decoder"):
        return "it is an encoder-decoder"
    if family in REFUSED:
        return REFUSED[family]
    if has("vision_config") is not None or has("audio_config") is not None:
        return "it reads images or sound"
    foreign = sorted({str(kind) for kind in has("layer_types") or ()} - {"full_attention", "sliding_attention"})
    if foreign or has("layers_block_type"):
        return f"it has {', '.join(foreign).replace('_', ' ') or 'mixed'} layers"
    if not has("rope_parameters") or has("alibi"):
        return "it has no rotary position embeddings"
    if has("position_embedding_type") in ("nope", "alibi", "absolute"):
        return "it has no rotary position embeddings"
    if has("kv_lora_rank"):
        return "it keeps latent keys and values (MLA)"
    if has("num_kv_shared_layers") or has("global_head_dim"):
        return "its layers share keys and values or differ in head size"
    if has("use_bidirectional_attention"):
        return "its attention looks ahead"
    for kind in rope_types(has("rope_parameters")):
        if kind not in (*FIXED, *BY_LENGTH):
            return f"its RoPE is of the unknown type {kind}"
    return ""


def _finish(network: Any, tokenizer: Any, checkpoint: Checkpoint) -> Model:
    """A model that can run: looked over, with what answering needs."""
    from dropkv import attention
    from dropkv.devices import execution_device
    from dropkv.probe import probe

    network.eval()
    model = _model(network, tokenizer, checkpoint, attention.entry_device(network))
    if checkpoint.weights == () or network.config.model_type not in TESTED:
        probe(network, model.geometry, checkpoint.id, unrotated_layers(network.config))
    return replace(
        model,
        stop_ids=_stop_ids(network, tokenizer, checkpoint.id),
        weights=checkpoint.weights,
        layer_devices=tuple(execution_device(layer) for layer in attention.layer_list(network)[2]),
    )


def _refuse_foreign(tokenizer: Any, network: Any, name: str) -> None:
    """Raise ModelError for the tokenizer of a larger model, whose ids would index past the embeddings."""
    spelled, rows = int(getattr(tokenizer, "vocab_size", 0)), int(network.get_input_embeddings().weight.shape[0])
    # Added tokens are left out of it: some models have no row for one that stands for an image.
    if spelled - len(getattr(tokenizer, "added_tokens_decoder", ())) > rows:
        raise ModelError(
            f"{name}: its tokenizer has {spelled:,} tokens, the model has {rows:,}; put the tokenizer that belongs to the model there"
        )


def _model(network: Any, tokenizer: Any, checkpoint: Checkpoint, device: torch.device) -> Model:
    """What a network, with weights or without, and where it came from say of a model. Raises ModelError for another model's tokenizer."""
    _refuse_foreign(tokenizer, network, checkpoint.id)
    return Model(
        network=network,
        tokenizer=tokenizer,
        id=checkpoint.id,
        source=checkpoint.source,
        revision=checkpoint.revision,
        device=device,
        dtype=next(weights.dtype for weights in network.parameters() if weights.is_floating_point()),
        geometry=geometry_of(network.config),
        max_positions=int(network.config.max_position_embeddings),
        stop_ids=frozenset(),
        rope=rope_of(network.config),
    )


def _stop_ids(network: Any, tokenizer: Any, name: str) -> frozenset[int]:
    """Every token that ends an answer: of the generation config, the tokenizer, and the template's end of a turn."""
    from dropkv.prompts import Seam

    ids: set[int] = set()
    for source in (getattr(network, "generation_config", None), tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or ())
    with contextlib.suppress(ModelError):  # said where the template is needed
        ids.update(Seam.of(tokenizer, name=name).turn_end_ids)
    return frozenset(ids)


def _name(name: object) -> str:
    """A model's name as text. Raises ModelError for what is none, such as a network of transformers."""
    if not isinstance(name, str | os.PathLike) or not isinstance(os.fspath(name), str):
        what = f"the model is of type {type(name).__name__}, not a name"
        if hasattr(name, "config") and hasattr(name, "parameters"):
            raise ModelError(
                f"{what}: give a network in memory as dropkv.models.wrap_model(network, tokenizer, id=NAME)"
            )
        raise ModelError(f"{what}: give an alias, a Hub id, a folder or what load_model returned")
    return os.fspath(name)


def dtype_named(name: object) -> str:
    """The name of a dtype, which may be given as torch's own."""
    name = str(name).removeprefix("torch.")
    plain = DTYPES.get(name, name)
    if plain not in ("auto", *DTYPES.values()):
        choices = ", ".join(["auto", *(f"{long} ({short})" for short, long in DTYPES.items())])
        raise UsageError(f"unknown dtype {name!r}: use one of {choices}")
    return plain


def devices_named(name: object) -> tuple[torch.device, ...]:
    """One device, which may be given as torch's own, or the GPUs that weights may be spread over."""
    import torch

    name = str(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return tuple(torch.device("cuda", index) for index in range(count)) or (torch.device("cpu"),)
    try:
        devices = tuple(torch.device(part.strip()) for part in name.split(","))
    except RuntimeError:
        devices = ()
    if not devices or (len(devices) > 1 and any(device.type != "cuda" for device in devices)):
        raise UsageError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:N or several as cuda:0,cuda:1")
    if any(device.type == "cuda" and (device.index or 0) >= count for device in devices):
        raise UsageError(f"device {name}: there are {count} CUDA devices here; use --device cpu or auto")
    return devices
