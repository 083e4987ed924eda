"""How much memory a prefill will take, part by part, and the largest slice that leaves room for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dropkv.fidelity import HeldOut
from dropkv.head import head_rows
from dropkv.kernels.triton_here import triton_works
from dropkv.memory import available_memory, expected_peak
from dropkv.methods import Method, odds_times_distance, probability
from dropkv.models import Model
from dropkv.observers import Observation
from dropkv.spans import GPU_SLICES, SLICE
from dropkv.two_orders import most_held

WORKSPACE = 64 << 20  # what matrix products on a GPU keep for themselves
SPARE = 0.95  # share of a GPU's memory that slices may fill: the rest is lost between blocks of the allocator
ENTRY_OVERHEAD = 12  # bytes of position, admit and score beside an entry's key and value


@dataclass(frozen=True)
class Footprint:
    """Bytes. weights: of the loaded model, on a CPU with the program; whole: what lives beside every slice (hidden states, rotary tables, one
    layer's keys and values, kept entries); per_token: of a slice; between: what a layer's scoring or the predictions take when no slice runs.
    """

    weights: int
    whole: int
    per_token: int
    between: int
    slices: tuple[int, ...]

    def peak(self, slice_tokens: int) -> int:
        """Expected peak with slices of so many tokens."""
        return self.weights + self.whole + max(self.per_token * slice_tokens, self.between)

    def slice_tokens(self, available: int | None) -> int:
        """The largest slice for which `available` bytes are enough, the smallest where none is."""
        fitting = [size for size in self.slices if available is None or self.peak(size) <= SPARE * available]
        return fitting[0] if fitting else self.slices[-1]


def footprint(
    model: Model,
    tokens: int,
    observation: Observation,
    held: HeldOut | None,
    *,
    methods: Sequence[Method] = (),
    kept: int = 0,
    documents: int = 1,
) -> Footprint:
    """For documents of `tokens` tokens that keep `kept` entries per KV head of layers with full attention, by one of `methods`."""
    config, size, on_gpu = model.network.config, model.dtype.itemsize, model.device.type == "cuda"
    weights = _weights(model)
    rows = [(layer.kv_heads * (layer.d_k + layer.d_v), layer) for layer in model.geometry]
    held_entries = max([kept, *(_held(model, method, kept, tokens) for method in methods)])
    kept_bytes = round(
        sum(
            (min(tokens, layer.window or tokens) if layer.kind == "sliding" else held_entries)
            * (row * size + layer.kv_heads * ENTRY_OVERHEAD)
            for row, layer in rows
        )
    )
    widest = max(row for row, _ in rows)
    sequence = tokens + sum(len(probe.ids) for probe in observation.probes) + (len(held.ids) if held else 0)
    hidden, inner, attention = _widths(config)
    rotary = 2 * max(layer.d_k for layer in model.geometry) * size
    whole = documents * (sequence * (hidden * size + rotary) + tokens * widest * size + kept_bytes)
    logits = 3 * len(held.scored) * int(config.vocab_size) * max(4, size) if held else 0
    if any("told" in method.needs for method in methods):
        logits = max(logits, 3 * head_rows(model) * int(config.vocab_size) * max(4, size))
    if not on_gpu:
        per_token = (4 * hidden + 3 * inner) * max(4, size)
        return Footprint(
            expected_peak(model.device, weights), whole + documents * sequence * hidden * size, documents * per_token, logits, (SLICE,)
        )  # fmt: skip
    windows = observation.window or any(probe.scored == (0, tokens) for probe in observation.probes)
    in_kernels = triton_works(model.device) and all(map(_has_kernel, methods))
    # Elsewhere a window is scored in float32, with keys, values and values again that have their lengths beside them.
    scoring = 0 if in_kernels or not windows else 4 * tokens * (widest + widest // 2)
    per_token = max(5 * hidden + 3 * inner, 4 * hidden + 5 * attention) * size
    return Footprint(weights + WORKSPACE, whole, documents * per_token, max(logits, documents * scoring), GPU_SLICES)


def slice_for(model: Model, found: Footprint) -> int:
    """Tokens a layer computes at once on this model's devices, whose memory counts as one."""
    found_free = [available_memory(device) for device in {*model.devices} if device.type == "cuda"]
    return found.slice_tokens(sum(free or 0 for free in found_free) if found_free else None)


def _held(model: Model, method: Method, kept: int, tokens: int) -> float:
    """Entries per KV head that are held when most of them are, before the last layer has decided."""
    layers = [layer.kv_heads for layer in model.geometry if layer.kind == "full"]
    if method.together is None or not layers:
        return kept
    forced, share = len(method.forced(tokens)), method.together.heads
    return most_held(kept, tokens, forced, layers, method.alpha, share) / sum(layers)


def _has_kernel(method: Method) -> bool:
    more = method.weigh or method.beside or method.beside_window or method.projected
    return method.observed is None or (method.observed in (odds_times_distance, probability) and not more)


def _weights(model: Model) -> int:
    """Bytes of the weights that are on GPUs; of all where none is, or nothing is loaded."""
    parameters = list(model.network.parameters())
    on_gpus = [parameter for parameter in parameters if parameter.is_cuda]
    return sum(parameter.numel() * parameter.element_size() for parameter in on_gpus or parameters)


def _widths(config: Any) -> tuple[int, int, int]:
    """Model dimension, width of the MLP's middle, width of all query heads."""
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(config.num_attention_heads)
    return hidden, inner, heads * int(getattr(config, "head_dim", None) or hidden // heads)
