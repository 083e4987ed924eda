"""transformers as it is: its own attention and its dynamic cache, which keeps every token."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dropkv import attention
from dropkv.bench.speed.machine import Figures, refuse, timed
from dropkv.devices import wait_for
from dropkv.models import Model


@contextmanager
def plain_attention(model: Model) -> Iterator[Any]:
    """The network with transformers' attention (sdpa) for the length of the block."""
    network: Any = model.network
    network.set_attn_implementation("sdpa")
    try:
        yield network
    finally:
        network.set_attn_implementation(attention.NAME)


def cache_bytes(model: Model, tokens: int) -> int:
    """Of a full cache of so many tokens."""
    rows = sum(layer.kv_heads * (layer.d_k + layer.d_v) for layer in model.geometry)
    return tokens * rows * model.dtype.itemsize


def prefill_bytes(model: Model, tokens: int) -> int:
    """What one layer's hidden states and the middle of its MLP take while a document is read whole."""
    config: Any = model.network.config
    inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return tokens * (4 * int(config.hidden_size) + 3 * inner) * model.dtype.itemsize


def read_plainly(model: Model, ids: Sequence[int]) -> Figures:
    """A prefill with the logits of the last token, its full cache kept."""
    refuse(model, cache_bytes(model, len(ids)) + prefill_bytes(model, len(ids)))
    tokens = torch.tensor([list(ids)], device=model.device)
    with plain_attention(model) as network, torch.inference_mode():
        return {"seconds": timed(model, lambda: network(input_ids=tokens, use_cache=True, logits_to_keep=1))}


def answer_plainly(model: Model, ids: Sequence[int], questions: Sequence[Sequence[int]], answer_tokens: int) -> Figures:
    """Questions over one document: it is read once, its cache is repeated for every question, and all are answered in one batch.

    Tokens are fetched at each step, as a loop that looks for stop tokens must.
    """
    rows, longest = len(questions), len(ids) + len(questions[0]) + answer_tokens
    caches = rows * cache_bytes(model, longest)
    refuse(model, caches + prefill_bytes(model, len(ids)), least=caches)
    with plain_attention(model) as network, torch.inference_mode():
        cache = _empty_cache(network)
        name = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
        place = 0

        def forward(tokens: list[list[int]]) -> list[int]:
            nonlocal place
            given = torch.tensor(tokens, device=model.device)
            places = torch.arange(place, place + given.shape[1], device=model.device).expand(len(tokens), -1)
            place += given.shape[1]
            out = network(input_ids=given, position_ids=places, use_cache=True, logits_to_keep=1, **{name: cache})
            chosen: list[int] = out.logits[:, -1].argmax(-1).tolist()
            return chosen

        wait_for(model.devices)
        started = time.perf_counter()
        forward([list(ids)])
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        chosen = forward([list(question) for question in questions])
        first = time.perf_counter() - started
        steps = []
        for _ in range(answer_tokens - 1):
            began = time.perf_counter()
            chosen = forward([[token] for token in chosen])
            steps.append(time.perf_counter() - began)
        return answer_figures(rows, first, steps, time.perf_counter() - started)


def answer_figures(rows: int, first: float, steps: Sequence[float], total: float) -> Figures:
    """What both ways of answering report: seconds until every row has its first token, of the median decode step behind it, and of all."""
    step = statistics.median(steps)
    return {
        "first_token_seconds": first,
        "step_seconds": step,
        "total_seconds": total,
        "tokens_per_second": rows / step,
    }


def _empty_cache(network: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=network.config)
