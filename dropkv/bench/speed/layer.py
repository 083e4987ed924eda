"""One layer alone: how long its scores take, how long what is kept of it, and what memory both want for themselves."""

from __future__ import annotations

import time

import torch

from dropkv.attention import output_projection
from dropkv.bench.speed.machine import Figures
from dropkv.devices import wait_for
from dropkv.keeper import Keeper
from dropkv.methods import LayerContext, LayerScores, Method, score_all
from dropkv.models import Model

TIMES = 5  # of one action, whose fastest counts: a launch that the host delays says nothing of the layer


def score_layer(model: Model, method: Method, tokens: int, window: int, kept: int) -> Figures:
    """Figures of the model's first layer with full attention: random keys and values of `tokens` tokens, `window` random queries per query head,
    nothing computed before; launches included.

    layer_score_seconds: attention of the window and scores; layer_keep_seconds: pooling, choice and copies of `kept` entries per KV head.
    layer_scratch_bytes, on a GPU: the most that both took beside keys, values, scores and entries.
    """
    index = next(i for i, layer in enumerate(model.geometry) if layer.kind == "full")
    geometry, device = model.geometry[index], model.device
    generator = torch.Generator(device).manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=model.dtype)

    heads, group = geometry.kv_heads, geometry.query_heads // geometry.kv_heads
    q, k, v = (
        draw(heads, group, min(window, tokens), geometry.d_k),
        draw(heads, tokens, geometry.d_k),
        draw(heads, tokens, geometry.d_v),
    )

    def score() -> tuple[LayerContext, LayerScores]:
        context = LayerContext(
            k, v, geometry.d_k**-0.5, None, q=q,
            wo=lambda: output_projection(model.network, index, geometry.query_heads * geometry.d_v),
        )  # fmt: skip
        return context, score_all([method], context, [None])[0]

    def keep(context: LayerContext, scores: LayerScores) -> object:
        keeper = Keeper(method, kept, tokens, [geometry])
        keeper.full(0, context, [scores])
        return keeper.finish()

    seconds = []
    for _ in range(TIMES):
        wait_for(model.devices)
        started = time.perf_counter()
        found = score()
        wait_for(model.devices)
        between = time.perf_counter()
        keep(*found)
        wait_for(model.devices)
        seconds.append((between - started, time.perf_counter() - between))
    figures = {
        "layer_score_seconds": min(one for one, _ in seconds),
        "layer_keep_seconds": min(other for _, other in seconds),
    }
    if device.type == "cuda":
        del found
        torch.cuda.reset_peak_memory_stats(device)
        found = score()
        entries = keep(*found)
        wait_for(model.devices)
        # Scores and entries are what is left, and `found` and `entries` hold them up to here.
        figures["layer_scratch_bytes"] = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        del found, entries
    return figures


def has_layer(method: Method, observer: str) -> bool:
    """Whether one layer says it all: the method scores with the window's queries, and shares no budget among layers."""
    return observer == "tail" and not method.needs and method.rule in ("uniform", "head-adaptive")
