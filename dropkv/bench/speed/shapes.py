"""Networks of a known model's shape with random weights: speed and memory without a download."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from dropkv.errors import ModelError, UsageError

if TYPE_CHECKING:
    import torch

    from dropkv.models import Model

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# As the configurations of the published models have them: MegaBeam-Mistral-7B-512k, Llama-3.1-8B, Qwen2.5-7B-1M, SmolLM2-135M.
SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": dict(
        model_type="mistral",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524288,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "llama-3.1-8b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=LLAMA_3_ROPE,
    ),
    "qwen2.5-7b": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=1010000,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    ),
    "smollm2-135m": dict(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
}
LARGE = 2 << 30  # bytes of weights from which a CPU has to be asked for by name


def check_shape(name: str) -> None:
    """Raise UsageError with the nearest name for an unknown shape."""
    if name in SHAPES:
        return
    near = difflib.get_close_matches(name.lower(), SHAPES, n=1, cutoff=0.3)
    advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(SHAPES)}"
    raise UsageError(f"unknown shape {name!r}: {advice}")


def build_shape(name: str, *, dtype: str = "auto", device: str = "auto") -> Model:
    """A random network of a shape, made on the device. dtype "auto": float32 on a CPU, else bfloat16.

    Raises UsageError for an unknown shape, dtype or device, ModelError where its weights do not fit, or where a large one would be made on
    a CPU that was not asked for.
    """
    check_shape(name)
    import torch

    from dropkv.models import devices_named, dtype_named

    wanted, (place, *_) = dtype_named(dtype), devices_named(device)
    if wanted == "auto":
        wanted = "float32" if place.type == "cpu" else "bfloat16"
    return make_network(name, SHAPES[name], getattr(torch, wanted), place, named=device != "auto")


def make_network(
    name: str, shape: dict[str, Any], dtype: torch.dtype, device: torch.device, *, named: bool = True
) -> Model:
    """A random network of any shape: a config's model_type and values. Raises ModelError as `build_shape`."""
    import torch
    import transformers

    from dropkv import attention
    from dropkv.memory import spare_memory
    from dropkv.models import Model, geometry_of
    from dropkv.rope import rope_of

    config = transformers.AutoConfig.for_model(
        shape["model_type"], **{k: v for k, v in shape.items() if k != "model_type"}
    )
    attention.register()

    def made(where: torch.device) -> Any:
        with where:
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME
            ).eval()

    size = sum(weights.nbytes for weights in made(torch.device("meta")).parameters())
    says = f"shape {name} takes {size / 2**30:.1f} GiB of weights in {str(dtype).removeprefix('torch.')}"
    if device.type == "cpu" and size >= LARGE and not named:
        raise ModelError(
            f"{says} and more to run, and there is no GPU here: use --shape smollm2-135m, or --device cpu to try it all the same"
        )
    spare = spare_memory(device)
    if spare is not None and size > spare:
        raise ModelError(
            f"{says}, {spare / 2**30:.1f} GiB are free on {device}: use a smaller shape or --dtype bfloat16"
        )
    network = made(device)
    return Model(
        network=network,
        tokenizer=None,
        id=name,
        source="folder",
        revision=None,
        device=device,
        dtype=dtype,
        geometry=geometry_of(network.config),
        max_positions=int(network.config.max_position_embeddings),
        stop_ids=frozenset(),
        rope=rope_of(network.config),
    )
