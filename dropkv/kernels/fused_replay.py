"""Attention of many probes at once, and the largest score any of their queries gives each document key, in one Triton kernel.

A probe's tokens see some document keys (its chunk, which is scored, and the sinks) and themselves. Each program holds a tile of (token, query
head) rows of one probe and KV head: a first pass over the keys makes outputs and sums, a second one over the scored keys makes scores, whose
maximum over the rows goes to memory. Probabilities never do, keys and values are read where they lie, and nothing is repeated per query head.

Precision: weights are rounded to the values' type for the product with them, and the outputs are divided by the sum of the rounded ones, so
that a stays a convex combination of values and a - v is as exact as the weights are. For keys with p > 1/2, at most one per row, 1 - p comes
from the sum of the other weights, and a - v is made directly instead of from squares that cancel.
The plain-torch twin is `dropkv.kernels.probe.probe_attention`. Not used by the prefill yet: see benchmarks/replay_kernel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
EPS = tl.constexpr(1e-6)


@dataclass(frozen=True)
class Segment:
    """One probe: its tokens [start, stop) among all probes' tokens, those from `observing` on observe; document keys [first, last) are scored,
    those of [sink_first, sink_last) are seen besides."""

    start: int
    stop: int
    observing: int
    first: int
    last: int
    sink_first: int
    sink_last: int


def fused_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    odds: bool,
    rows: int = 64,
    columns: int = 64,
    warps: int = 4,
    stages: int = 2,
) -> tuple[Tensor, Tensor]:
    """Outputs [heads, T, d_v] of all probes' tokens, and scores float32 [kv_heads, n] of the document's keys, 0 where no probe looks.

    q [heads, T, d]; k [kv_heads, n, d], v [kv_heads, n, d_v] of the document; own_k [kv_heads, T, d], own_v [kv_heads, T, d_v] of the probes.
    odds: the score is max p / (1 - p + eps) * ||a - v||, else max p; over queries and the group's heads.
    The last dimension must be dense. rows, columns: the tile; columns at least 16, both powers of two.
    """
    heads, tokens, d = q.shape
    kv_heads, n, d_v = v.shape
    group = heads // kv_heads
    out = q.new_empty((heads, tokens, d_v))
    scores = torch.zeros((kv_heads, n), dtype=torch.float32, device=q.device)
    table: list[list[int]] = []
    tiles: list[tuple[int, int]] = []
    for number, segment in enumerate(segments):
        sinks = (segment.sink_first, segment.sink_last)
        table.append([segment.start, segment.stop, segment.observing, segment.first, segment.last, *sinks])
        tiles.extend((number, row) for row in range(0, (segment.stop - segment.start) * group, rows))
    places = torch.tensor(table, dtype=torch.int32, device=q.device)
    tile_table = torch.tensor(tiles, dtype=torch.int32, device=q.device)
    _replay[(len(tiles), kv_heads)](
        q, k, v, own_k, own_v, out, scores, places, tile_table, scale * LOG2E,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        own_k.stride(0), own_k.stride(1), own_v.stride(0), own_v.stride(1), out.stride(0), out.stride(1), n,
        GROUP=group, D=d, DV=d_v, BD=max(16, triton.next_power_of_2(d)), BDV=max(16, triton.next_power_of_2(d_v)),
        BM=rows, BN=columns, ODDS=odds, SPLIT=q.dtype != torch.float32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, scores.sqrt_() if odds else scores


@triton.jit
def _keys(base, stride, first, last, lines, width, BD: tl.constexpr, D: tl.constexpr):
    """Rows [BN, BD] of a tensor, zeros beyond `last` and beyond D."""
    inside = lines < last
    mask = inside[:, None] & (width < D)[None, :] if BD != D else inside[:, None]
    return tl.load(base + lines[:, None].to(tl.int64) * stride + width[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    q, key_base, key_stride, value_base, value_stride, first, last, causal, token, biggest, total, others, rounded, acc, factor,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One range of keys into the running softmax of every row."""
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    for start in range(first, last, BN):
        lines = start + tl.arange(0, BN)
        k = _keys(key_base, key_stride, first, last, lines, width, BD, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        seen = (lines < last)[None, :]
        if causal:
            seen = seen & (lines[None, :] <= token[:, None])
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(biggest, tl.max(s, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(s - base[:, None])
        fade = tl.exp2(biggest - base)
        v = _keys(value_base, value_stride, first, last, lines, value_width, BDV, DV)
        narrow = weights.to(v.dtype)
        total = total * fade + tl.sum(weights, 1)
        joins = tl.where((biggest < new) & (biggest > -float("inf")), fade, 0.0)  # a largest key that no longer is
        others = others * fade + joins + tl.sum(tl.where(s < new[:, None], weights, 0.0), 1)
        rounded = rounded * fade + tl.sum(narrow.to(tl.float32), 1)
        acc = acc * fade[:, None] + tl.dot(narrow, v, input_precision="ieee")
        biggest = new
    return biggest, total, others, rounded, acc


@triton.jit
def _replay(
    Q, K, V, OWN_K, OWN_V, OUT, SCORES, PLACES, TILES, factor,
    q_head, q_token, k_head, k_token, v_head, v_token, ok_head, ok_token, ov_head, ov_token, o_head, o_token, n,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ODDS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    place = PLACES + tl.load(TILES + tile * 2) * 7
    row = tl.load(TILES + tile * 2 + 1) + tl.arange(0, BM)
    start, stop, observing = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    first, last = tl.load(place + 3), tl.load(place + 4)
    sink_first, sink_last = tl.load(place + 5), tl.load(place + 6)

    token = start + row // GROUP
    query_head = head * GROUP + row % GROUP
    real = token < stop
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    q_mask = real[:, None] & (width < D)[None, :]
    q_place = query_head[:, None].to(tl.int64) * q_head + token[:, None].to(tl.int64) * q_token + width[None, :]
    q = tl.load(Q + q_place, mask=q_mask, other=0.0)

    k_base, v_base = K + head.to(tl.int64) * k_head, V + head.to(tl.int64) * v_head
    biggest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    others = tl.zeros([BM], tl.float32)
    rounded = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    biggest, total, others, rounded, acc = _attend(
        q, k_base, k_token, v_base, v_token, first, last, False, token, biggest, total, others, rounded, acc, factor,
        D, DV, BD, BDV, BN,
    )  # fmt: skip
    biggest, total, others, rounded, acc = _attend(
        q, k_base, k_token, v_base, v_token, sink_first, sink_last, False, token, biggest, total, others, rounded, acc, factor,
        D, DV, BD, BDV, BN,
    )  # fmt: skip
    newest = tl.minimum(stop, tl.max(token, 0) + 1)
    biggest, total, others, rounded, acc = _attend(
        q, OWN_K + head.to(tl.int64) * ok_head, ok_token, OWN_V + head.to(tl.int64) * ov_head, ov_token,
        start, newest, True, token, biggest, total, others, rounded, acc, factor, D, DV, BD, BDV, BN,
    )  # fmt: skip
    a = acc / rounded[:, None]
    o_place = query_head[:, None].to(tl.int64) * o_head + token[:, None].to(tl.int64) * o_token + value_width[None, :]
    tl.store(OUT + o_place, a.to(OUT.dtype.element_ty), mask=real[:, None] & (value_width < DV)[None, :])

    observes = real & (token >= observing)
    share = 1.0 / total
    rest = others * share  # 1 - p of a row's largest key, where one is alone the largest
    if ODDS:
        length = tl.sum(a * a, 1)
        high = a.to(q.dtype)
        low = (a - high.to(tl.float32)).to(q.dtype)
    for begin in range(first, last, BN):
        lines = begin + tl.arange(0, BN)
        k = _keys(k_base, k_token, first, last, lines, width, BD, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        p = tl.exp2(s - biggest[:, None]) * share[:, None]
        score = p
        if ODDS:
            v = _keys(v_base, v_token, first, last, lines, value_width, BDV, DV)
            inner = tl.dot(high, tl.trans(v), input_precision="ieee")
            if SPLIT:
                inner += tl.dot(low, tl.trans(v))
            wide = v.to(tl.float32)
            square = tl.maximum(length[:, None] + tl.sum(wide * wide, 1)[None, :] - 2.0 * inner, 0.0)
            loud = (p > 0.5) & (lines < last)[None, :]
            away = 1.0 - p
            if tl.max(tl.max(loud.to(tl.int32), 1), 0) > 0:
                own = tl.dot(loud.to(v.dtype), v, input_precision="ieee")  # the loud key's value, exactly
                gap = a - own
                square = tl.where(loud, tl.sum(gap * gap, 1)[:, None], square)
                away = tl.where(loud, rest[:, None], away)
            odds = p / (away + EPS)
            score = odds * odds * square
        score = tl.where(observes[:, None], score, 0.0)
        tl.atomic_max(SCORES + head.to(tl.int64) * n + lines, tl.max(score, 0), mask=lines < last, sem="relaxed")
