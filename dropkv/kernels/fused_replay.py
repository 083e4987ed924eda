"""Attention of many probes at once, and the largest score any of their queries gives each document key, in two Triton kernels.

A probe's tokens see some document keys (its chunk, which is scored, and the sinks) and themselves. The first kernel holds a tile of (token,
query head) rows of one probe and KV head, and makes outputs and log-sum-exps. The second holds a tile of scored keys, and goes through the
rows that observe them: with the log-sum-exps known, two products per tile give p and ||a - v||, and the maximum over the rows stays in
registers. Probabilities are never written, keys and values are read where they lie, and nothing is repeated per query head.

A key with p > 1/2, at most one per row, is scored by the first kernel, which still has the row's sums in float32: 1 - p is the sum of the
other weights, and a - v is made directly instead of from squares that cancel. The second kernel takes such a p as 1/2, which is never more;
where steps are added up, the first one leaves each row's exact step and its place, and the second puts it in.
The largest weight is 1 only but for the rounding of its logit (a fused multiply-add does not round the product that is subtracted), so it is
taken out of the sums as it went in, and what fades is kept as it is while the largest logit stays: the difference of two equal products is
not 0 where only one of them is rounded. Weights of float16 are enlarged, since it has no small numbers.
The plain-torch twin is `dropkv.kernels.probe.probe_attention`.
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
ENLARGED = 14  # a power of two: 2^14 is the largest weight then, and float16 holds up to 2^16


@dataclass(frozen=True)
class Tiles:
    """Shapes of both kernels' tiles: rows x columns of the attention, queries x keys of the scores; powers of two, at least 16."""

    rows: int = 128
    columns: int = 64
    warps: int = 8
    stages: int = 3
    queries: int = 64
    keys: int = 64
    score_warps: int = 4
    score_stages: int = 1


@dataclass(frozen=True)
class Prepared:
    """Which probe's rows and keys each program takes, int32 tables on the device: places [probes, 7], rows and keys [programs, 2]."""

    places: Tensor
    rows: Tensor
    keys: Tensor
    tiles: Tiles


def prepare(
    segments: Sequence[Sequence[int]], group: int, width: int, device: torch.device, tiles: Tiles | None = None
) -> Prepared:
    """Tables for probes with `group` query heads per KV head of at most `width` dimensions.

    A segment is one probe: (start, stop, observing, first, last, sink_first, sink_last). Its tokens are [start, stop) among all probes'
    tokens, those from `observing` on observe; document keys [first, last) are scored, those of [sink_first, sink_last) are seen besides.
    """
    chosen = tiles or (Tiles() if width <= 128 else Tiles(rows=64, columns=32, warps=4, stages=2, queries=64, keys=32))
    rows = [(i, row) for i, one in enumerate(segments) for row in range(0, (one[1] - one[0]) * group, chosen.rows)]
    keys = [(i, key) for i, one in enumerate(segments) for key in range(one[3], one[4], chosen.keys)]
    places, of_rows, of_keys = (torch.tensor(list(x), dtype=torch.int32, device=device) for x in (segments, rows, keys))
    return Prepared(places, of_rows, of_keys, chosen)


def fused_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    prepared: Prepared,
    *,
    scale: float,
    odds: bool,
    every: bool = False,
    told: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [heads, T, d_v] of all probes' tokens, and scores float32 [kv_heads, n] of the document's keys, 0 where no probe looks.

    q [heads, T, d]; k [kv_heads, n, d], v [kv_heads, n, d_v] of the document; own_k [kv_heads, T, d], own_v [kv_heads, T, d_v] of the probes.
    odds: the score is the step p / (1 - p + eps) * ||a - v||, else p; the largest over queries and the group's heads.
    every: scores [3, kv_heads, n], the largest step, the largest p, and the largest of the group's heads' sums of steps over one probe's queries.
    told float32 [kv_heads, T]: what every query's step and p count times before the largest is taken; sums are not weighed. Not for odds alone.
    The last dimension must be dense, scale positive.
    """
    if told is not None and odds and not every:
        raise ValueError("steps are weighed with every score alone")
    heads, tokens, d = q.shape
    kv_heads, n, d_v = v.shape
    tiles = prepared.tiles
    out = q.new_empty((tokens, heads, d_v)).transpose(0, 1)  # as layers want it
    log_sum = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    square = torch.empty_like(log_sum)
    scores = torch.zeros((3 if every else 1, kv_heads, n), dtype=torch.float32, device=q.device)
    exact = torch.empty_like(log_sum) if every else log_sum
    where = torch.empty_like(log_sum, dtype=torch.int32) if every else prepared.places
    shape = {
        "GROUP": heads // kv_heads,
        "D": d,
        "DV": d_v,
        "BD": max(16, triton.next_power_of_2(d)),
        "BDV": max(16, triton.next_power_of_2(d_v)),
    }
    weighed = told is not None
    weights = log_sum if told is None else told.float().contiguous()
    enlarged = ENLARGED if v.dtype == torch.float16 else 0
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # where Triton launches
        _attend[(len(prepared.rows), kv_heads)](
            q, k, v, own_k, own_v, out, log_sum, square, exact, where, scores, prepared.places, prepared.rows, scale * LOG2E,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            own_k.stride(0), own_k.stride(1), own_v.stride(0), own_v.stride(1), out.stride(0), out.stride(1), n, tokens,
            **shape, ODDS=odds or every, EVERY=every, TOLD=weighed, BM=tiles.rows, BN=tiles.columns, MORE=enlarged, num_warps=tiles.warps,
            num_stages=tiles.stages,
        )  # fmt: skip
        grid = (len(prepared.keys), kv_heads)
        strides = (
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            out.stride(0),
            out.stride(1),
        )
        if len(prepared.keys) and every:
            _score_every[grid](
                q, k, v, out, log_sum, square, exact, where, weights, scores, prepared.places, prepared.keys, scale * LOG2E, *strides, n, tokens,
                **shape, TOLD=weighed, BQ=tiles.queries, BK=tiles.keys, num_warps=2 * tiles.score_warps, num_stages=tiles.score_stages,
            )  # fmt: skip
        elif len(prepared.keys):
            _score[grid](
                q, k, v, out, log_sum, square, weights, scores, prepared.places, prepared.keys, scale * LOG2E, *strides, n, tokens,
                **shape, ODDS=odds, TOLD=weighed, BQ=tiles.queries, BK=tiles.keys, num_warps=tiles.score_warps, num_stages=tiles.score_stages,
            )  # fmt: skip
    if odds or every:
        scores[0].sqrt_()
    return out, scores if every else scores[0]


@triton.jit
def _lines(base, stride, lines, last, width, BD: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr):
    """Rows [BN, BD] of a tensor; zeros beyond D and, where asked, from row `last` on."""
    place = base + lines[:, None].to(tl.int64) * stride + width[None, :]
    if MASK and BD != D:
        return tl.load(place, mask=(lines < last)[:, None] & (width < D)[None, :], other=0.0)
    if MASK:
        return tl.load(place, mask=(lines < last)[:, None], other=0.0)
    if BD != D:
        return tl.load(place, mask=(width < D)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def _range(
    q, key_base, key_stride, value_base, value_stride, first, last, token, biggest, base, total, acc, where, factor,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    MORE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """One range of keys into the running softmax of every row, whose weights are 2^(s * factor - base).

    biggest: the largest s, base: its product with the factor, less MORE; where: its key's index, as far as it is tracked.
    """
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    for start in range(first, last, BN):
        lines = start + tl.arange(0, BN)
        k = _lines(key_base, key_stride, lines, last, width, BD, D, MASK)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAUSAL:
            s = tl.where(lines[None, :] <= token[:, None], s, -float("inf"))
        elif MASK:
            s = tl.where((lines < last)[None, :], s, -float("inf"))
        largest = tl.max(s, 1)
        new = tl.maximum(biggest, largest)
        if TRACK:
            found = tl.max(tl.where(s == largest[:, None], lines[None, :], -1), 1)
            where = tl.where(largest > biggest, found, where)
        shift = tl.where(new == -float("inf"), 0.0, new) * factor - MORE
        weights = tl.exp2(tl.fma(s, factor, -shift[:, None]))
        fade = tl.where(new == biggest, 1.0, tl.exp2(base - shift))
        v = _lines(value_base, value_stride, lines, last, value_width, BDV, DV, MASK)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        biggest = new
        base = tl.where(new == -float("inf"), -float("inf"), shift)
    return biggest, base, total, acc, where


@triton.jit
def _attend(
    Q, K, V, OWN_K, OWN_V, OUT, LOG_SUM, SQUARE, EXACT, WHERE, SCORES, PLACES, TILES, factor,
    q_head, q_token, k_head, k_token, v_head, v_token, ok_head, ok_token, ov_head, ov_token, o_head, o_token, n, tokens,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, ODDS: tl.constexpr,
    EVERY: tl.constexpr, TOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MORE: tl.constexpr,
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
    q_place = query_head[:, None].to(tl.int64) * q_head + token[:, None].to(tl.int64) * q_token + width[None, :]
    q = tl.load(Q + q_place, mask=real[:, None] & (width < D)[None, :], other=0.0)

    k_base, v_base = K + head.to(tl.int64) * k_head, V + head.to(tl.int64) * v_head
    ok_base, ov_base = OWN_K + head.to(tl.int64) * ok_head, OWN_V + head.to(tl.int64) * ov_head
    biggest = tl.full([BM], -float("inf"), tl.float32)
    base = biggest
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    where = tl.full([BM], -1, tl.int32)
    full = first + (last - first) // BN * BN
    biggest, base, total, acc, where = _range(
        q, k_base, k_token, v_base, v_token, first, full, token, biggest, base, total, acc, where, factor, D, DV, BD, BDV, BN, MORE,
        False, False, ODDS,
    )  # fmt: skip
    biggest, base, total, acc, where = _range(
        q, k_base, k_token, v_base, v_token, full, last, token, biggest, base, total, acc, where, factor, D, DV, BD, BDV, BN, MORE,
        True, False, ODDS,
    )  # fmt: skip
    scored = biggest
    biggest, base, total, acc, where = _range(
        q, k_base, k_token, v_base, v_token, sink_first, sink_last, token, biggest, base, total, acc, where, factor,
        D, DV, BD, BDV, BN, MORE, True, False, False,
    )  # fmt: skip
    newest = tl.minimum(stop, tl.max(token, 0) + 1)
    biggest, base, total, acc, where = _range(
        q, ok_base, ok_token, ov_base, ov_token, start, newest, token, biggest, base, total, acc, where, factor,
        D, DV, BD, BDV, BN, MORE, True, True, False,
    )  # fmt: skip

    share = 1.0 / total
    a = acc * share[:, None]
    narrow = a.to(OUT.dtype.element_ty)
    o_place = query_head[:, None].to(tl.int64) * o_head + token[:, None].to(tl.int64) * o_token + value_width[None, :]
    tl.store(OUT + o_place, narrow, mask=real[:, None] & (value_width < DV)[None, :])
    line = query_head.to(tl.int64) * tokens + token
    tl.store(LOG_SUM + line, base + tl.log2(total), mask=real)
    if ODDS:
        wide = narrow.to(tl.float32)
        tl.store(SQUARE + line, tl.sum(wide * wide, 1), mask=real)
        most = tl.exp2(tl.fma(biggest, factor, -base))
        loud = real & (token >= observing) & (total < 2.0 * most) & (scored == biggest)
        if EVERY:
            tl.store(WHERE + line, tl.where(loud, where, -1), mask=real)
        if tl.max(loud.to(tl.int32), 0) > 0:
            mask = loud[:, None] & (value_width < DV)[None, :]
            own = tl.load(v_base + where[:, None].to(tl.int64) * v_token + value_width[None, :], mask=mask, other=0.0)
            rest = total - most
            in_sum = most.to(V.dtype.element_ty).to(tl.float32)
            own = own.to(tl.float32)
            gap = ((acc - in_sum[:, None] * own) - rest[:, None] * own) * share[:, None]
            odds = most * share / (rest * share + EPS)
            score = odds * odds * tl.sum(gap * gap, 1)
            if not TOLD:  # where queries weigh, the second kernel puts the exact step in
                tl.atomic_max(SCORES + head.to(tl.int64) * n + where, score, mask=loud, sem="relaxed")
            if EVERY:
                tl.store(EXACT + line, tl.sqrt(score), mask=loud)


@triton.jit
def _score(
    Q, K, V, OUT, LOG_SUM, SQUARE, WEIGHTS, SCORES, PLACES, TILES, factor,
    q_head, q_token, k_head, k_token, v_head, v_token, o_head, o_token, n, tokens,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, ODDS: tl.constexpr,
    TOLD: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    place = PLACES + tl.load(TILES + tile * 2) * 7
    key = tl.load(TILES + tile * 2 + 1) + tl.arange(0, BK)
    stop, observing, last = tl.load(place + 1), tl.load(place + 2), tl.load(place + 4)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    k = tl.trans(_lines(K + head.to(tl.int64) * k_head, k_token, key, last, width, BD, D, True))
    if ODDS:
        v = _lines(V + head.to(tl.int64) * v_head, v_token, key, last, value_width, BDV, DV, True)
        length = v.to(tl.float32)
        length = tl.sum(length * length, 1)
        v = tl.trans(v)
    best = tl.zeros([BQ, BK], tl.float32)
    steps = (stop - observing + BQ - 1) // BQ
    for step in range(0, steps * GROUP):
        query_head = head * GROUP + step // steps
        token = observing + step % steps * BQ + tl.arange(0, BQ)
        line = query_head.to(tl.int64) * tokens + token
        q = _lines(Q + query_head.to(tl.int64) * q_head, q_token, token, stop, width, BD, D, True)
        log_sum = tl.load(LOG_SUM + line, mask=token < stop, other=float("inf"))  # p is 0 where there is no query
        s = tl.dot(q, k, input_precision="ieee")
        p = tl.exp2(s * factor - log_sum[:, None])
        if ODDS:
            a = _lines(OUT + query_head.to(tl.int64) * o_head, o_token, token, stop, value_width, BDV, DV, True)
            square = tl.load(SQUARE + line, mask=token < stop, other=0.0)
            inner = tl.dot(a, v, input_precision="ieee")
            p = tl.minimum(p, 0.5)
            root = tl.rsqrt(-p + (1.0 + EPS))  # its square is the reciprocal, at a third of the cost of a division
            odds = p * (root * root)
            p = odds * odds * (square[:, None] + length[None, :] - 2.0 * inner)
        elif TOLD:
            p *= tl.load(WEIGHTS + head.to(tl.int64) * tokens + token, mask=token < stop, other=0.0)[:, None]
        best = tl.maximum(best, p)
    tl.atomic_max(SCORES + head.to(tl.int64) * n + key, tl.max(best, 0), mask=key < last, sem="relaxed")


@triton.jit
def _score_every(
    Q, K, V, OUT, LOG_SUM, SQUARE, EXACT, WHERE, WEIGHTS, SCORES, PLACES, TILES, factor,
    q_head, q_token, k_head, k_token, v_head, v_token, o_head, o_token, n, tokens,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, TOLD: tl.constexpr,
    BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    place = PLACES + tl.load(TILES + tile * 2) * 7
    key = tl.load(TILES + tile * 2 + 1) + tl.arange(0, BK)
    stop, observing, last = tl.load(place + 1), tl.load(place + 2), tl.load(place + 4)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    k = tl.trans(_lines(K + head.to(tl.int64) * k_head, k_token, key, last, width, BD, D, True))
    v = _lines(V + head.to(tl.int64) * v_head, v_token, key, last, value_width, BDV, DV, True)
    length = v.to(tl.float32)
    length = tl.sum(length * length, 1)
    v = tl.trans(v)
    steps = (stop - observing + BQ - 1) // BQ
    largest = tl.zeros([BK], tl.float32)
    likeliest = tl.zeros([BK], tl.float32)
    most = tl.zeros([BK], tl.float32)
    for member in range(0, GROUP):
        query_head = head * GROUP + member
        summed = tl.zeros([BK], tl.float32)
        for step in range(0, steps):
            token = observing + step * BQ + tl.arange(0, BQ)
            line = query_head.to(tl.int64) * tokens + token
            q = _lines(Q + query_head.to(tl.int64) * q_head, q_token, token, stop, width, BD, D, True)
            log_sum = tl.load(LOG_SUM + line, mask=token < stop, other=float("inf"))  # p is 0 where there is no query
            p = tl.exp2(tl.dot(q, k, input_precision="ieee") * factor - log_sum[:, None])
            if TOLD:
                weight = tl.load(WEIGHTS + head.to(tl.int64) * tokens + token, mask=token < stop, other=0.0)[:, None]
                likeliest = tl.maximum(likeliest, tl.max(p * weight, 0))
            else:
                likeliest = tl.maximum(likeliest, tl.max(p, 0))
            a = _lines(OUT + query_head.to(tl.int64) * o_head, o_token, token, stop, value_width, BDV, DV, True)
            square = tl.load(SQUARE + line, mask=token < stop, other=0.0)
            inner = tl.dot(a, v, input_precision="ieee")
            p = tl.minimum(p, 0.5)
            root = tl.rsqrt(-p + (1.0 + EPS))
            moved = p * (root * root) * tl.sqrt(tl.maximum(square[:, None] + length[None, :] - 2.0 * inner, 0.0))
            where = tl.load(WHERE + line, mask=token < stop, other=-1)
            exact = tl.load(EXACT + line, mask=(token < stop) & (where >= 0), other=0.0)
            moved = tl.where(where[:, None] == key[None, :], exact[:, None], moved)
            summed += tl.sum(moved, 0)
            if TOLD:
                moved *= weight
            largest = tl.maximum(largest, tl.max(moved, 0))
        most = tl.maximum(most, summed)
    line = SCORES + head.to(tl.int64) * n + key
    part = tl.num_programs(1).to(tl.int64) * n
    tl.atomic_max(line, largest * largest, mask=key < last, sem="relaxed")
    tl.atomic_max(line + part, likeliest, mask=key < last, sem="relaxed")
    tl.atomic_max(line + 2 * part, most, mask=key < last, sem="relaxed")
