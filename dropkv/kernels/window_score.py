"""Scores of a window of observation queries in one pass over K and V (Triton), given their attention: a tile of keys meets all rows (queries of
all query heads of a KV head), products run on tensor cores, and p, odds, distance and sums stay in registers.

||a - v||^2 is ||a||^2 - 2 <a, v> + ||v||^2, a as two numbers of V's type. Keys with p > 1/2, at most one per row, would cancel there and in
1 - p: theirs come from the attention pass (`dropkv.kernels.window_attend`), or, with an attention from elsewhere, from a - v itself.
The plain-torch twin is `dropkv.kernels.score`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropkv.kernels.score import Score, Weight
from dropkv.kernels.window_attend import (
    EPS,
    Attention,
    Tile,
    fitting,
    logit_factors,
    logits,
    precision_of,
    programs_of,
    tile_of,
    width_of,
)

WEIGHTS: tuple[Weight, ...] = ("p", "odds", "squared odds", "along")
MOST_ROWS = 64  # of one tile
LOG2E = tl.constexpr(1.4426950408889634)


def score_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention,
    what: Score,
    *,
    scale: float,
    softcap: float | None = None,
    columns: int | None = None,
    causal: bool = True,
    factors: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Scores float32 [kv_heads, columns] of the first `columns` keys (all by default), into `out` if given.

    q [kv_heads, G, m, d] are the queries of the last m of the n keys k [kv_heads, n, d], v [kv_heads, n, d_v]; causal: False: every query
    sees every key. Where `columns` is smaller than n, the rest of k and v is not read. attention: that of the queries, outputs in float32.
    factors [kv_heads, G, columns]: what every head's l2 is multiplied with. The last dimensions must be dense. Raises ValueError for
    reductions that the kernel has no form of.
    """
    kv_heads, group, m, d = q.shape
    n, d_v = v.shape[1:]
    count = n if columns is None else columns
    if what.over == "l2" and (what.weight != "p" or triton.next_power_of_2(m) > MOST_ROWS):
        raise ValueError("l2 is there for p alone, and for windows that fit into a tile")
    if what.over == "max" and what.weight == "along":
        raise ValueError("the largest of scores that may be negative is not there")
    per_head = triton.next_power_of_2(m) if what.over == "l2" else m
    tile = tile or score_tile(q, d_v, group * per_head)
    rows = max(16, tile.rows, per_head if what.over == "l2" else 1)
    blocks = triton.cdiv(group * per_head, rows)
    scores = torch.empty((kv_heads, count), dtype=torch.float32, device=q.device) if out is None else out
    if count == 0:
        return scores
    tiles = triton.cdiv(count, tile.keys)
    parts = tiles if blocks > 1 else max(1, min(tiles, programs_of(q, tile) // kv_heads))
    span = triton.cdiv(tiles, parts) * tile.keys
    inner, outer = logit_factors(scale, softcap)
    known = attention.loud is not None
    root = what.over == "max" and what.weight == "odds"  # taken of the largest square: there are fewer of them
    outputs = attention.outputs.contiguous() if what.reads_values and attention.outputs is not None else q
    _score[(triton.cdiv(count, span), kv_heads)](
        q, k, v, outputs, attention.log_sum_exp.contiguous(), attention.loud, attention.loud_odds, attention.loud_gap, factors, scores,
        inner, outer, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), v.stride(0), v.stride(1), scores.stride(0),
        n, count, m, group, span, blocks, per_head,
        HEADS=rows // per_head if what.over == "l2" else 1, BM=rows, BN=tile.keys, ONE=blocks == 1, CAUSAL=causal and count > n - m + 1,
        CAPPED=softcap is not None, KNOWN=known, WEIGHT=2 if root else WEIGHTS.index(what.weight), MAXIMUM=what.over == "max", ROOT=root,
        L2=what.over == "l2", PRECISION=precision_of(q), D=d, DV=d_v,
        BD=width_of(d), BDV=width_of(d_v), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return scores


def score_tile(q: Tensor, d_v: int, rows: int) -> Tile:
    """A tile that suits the inputs."""
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    wide = max(q.shape[-1], d_v) > 128
    if q.dtype == torch.float32:
        return fitting(Tile(height, 32, 8 if wide else 4, 2), q, d_v)
    return fitting(Tile(height, 64, 4, 2 if wide else 3), q, d_v)


@triton.jit
def _rows_of(
    Q, A, LSE, LOUD, LOUD_ODDS, LOUD_GAP, head, block, q_head, q_group, q_query, n, m, group, per_head,
    BM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, KNOWN: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Everything of one block of rows: queries, outputs in two parts and their squared lengths, log-sum-exps, last key seen, loud keys."""
    row = block * BM + tl.arange(0, BM)
    query_head, query = row // per_head, row % per_head
    real = (query_head < group) & (query < m)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    place = query_head[:, None].to(tl.int64) * q_group + query[:, None].to(tl.int64) * q_query + width[None, :]
    q = tl.load(Q + head * q_head + place, mask=real[:, None] & (width < D)[None, :], other=0.0)
    index = (head * group + query_head) * m + query
    sums = tl.load(LSE + index, mask=real, other=float("inf"))
    sums = tl.where(sums == -float("inf"), float("inf"), sums) * LOG2E  # a row that sees nothing, or is none, has p = 0
    limit = n - m + query
    loud = tl.full([BM], -1, tl.int32)
    odds = tl.zeros([BM], tl.float32)
    gap = tl.zeros([BM], tl.float32)
    high = q
    low = q
    length = odds
    if WEIGHT > 0:
        inside = real[:, None] & (value_width < DV)[None, :]
        a = tl.load(A + index[:, None] * DV + value_width[None, :], mask=inside, other=0.0)
        high = a.to(Q.dtype.element_ty)
        low = (a - high.to(tl.float32)).to(Q.dtype.element_ty)
        length = tl.sum(a * a, 1)
        if KNOWN and WEIGHT < 3:
            loud = tl.load(LOUD + index, mask=real, other=-1)
            odds = tl.load(LOUD_ODDS + index, mask=real, other=0.0)
            gap = tl.load(LOUD_GAP + index, mask=real, other=0.0)
    return q, high, low, length, sums, limit, loud, odds, gap, index, real


@triton.jit
def _contributions(
    k, v, squares, q, high, low, length, sums, limit, loud, loud_odds, loud_gap, index, real, A, inner, outer, lines, last,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, KNOWN: tl.constexpr, WEIGHT: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What every row adds to every key of a tile [BN, BM]."""
    s = logits(tl.dot(k, tl.trans(q), input_precision=PRECISION), inner, outer, CAPPED)
    p = tl.exp2(s - sums[None, :])
    if CAUSAL:
        p = tl.where(lines[:, None] <= limit[None, :], p, 0.0)
    if WEIGHT > 0:
        product = tl.dot(v, tl.trans(high), input_precision=PRECISION)
        if v.dtype != tl.float32:
            product = tl.dot(v, tl.trans(low), product)
        if WEIGHT == 3:
            p = p * product
        else:
            distance = tl.maximum(squares[:, None] + length[None, :] - 2.0 * product, 0.0)
            odds = p / (tl.maximum(1.0 - p, 0.0) + EPS)
            if KNOWN:
                here = lines[:, None] == loud[None, :]
                odds = tl.where(here, loud_odds[None, :], odds)
                distance = tl.where(here, loud_gap[None, :], distance)
            else:
                near = (p > 0.5) & (lines < last)[:, None]
                if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
                    width = tl.arange(0, BDV)
                    own = tl.dot(tl.trans(near.to(v.dtype)), v, input_precision=PRECISION)  # each row's near value
                    inside = real[:, None] & (width < DV)[None, :]
                    gap = tl.load(A + index[:, None] * DV + width[None, :], mask=inside, other=0.0) - own
                    distance = tl.where(near, tl.sum(gap * gap, 1)[None, :], distance)
            p = odds * tl.sqrt(distance) if WEIGHT == 1 else odds * odds * distance
    return p


@triton.jit(do_not_specialize=["n", "count", "m", "group", "span", "blocks", "per_head", "out_head"])
def _score(
    Q, K, V, A, LSE, LOUD, LOUD_ODDS, LOUD_GAP, FACTORS, OUT, inner, outer,
    q_head, q_group, q_query, k_head, k_key, v_head, v_key, out_head, n, count, m, group, span, blocks, per_head,
    HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    KNOWN: tl.constexpr, WEIGHT: tl.constexpr, MAXIMUM: tl.constexpr, ROOT: tl.constexpr, L2: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * span
    last = tl.minimum(count, first + span)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    k_base, v_base = K + head * k_head, V + head * v_head
    if ONE:
        q, high, low, length, sums, limit, loud, loud_odds, loud_gap, index, real = _rows_of(
            Q, A, LSE, LOUD, LOUD_ODDS, LOUD_GAP, head, 0, q_head, q_group, q_query, n, m, group, per_head,
            BM, D, DV, BD, BDV, KNOWN, WEIGHT,
        )  # fmt: skip
    for start in range(first, last, BN):
        lines = start + tl.arange(0, BN)
        k = tile_of(k_base, k_key, lines, last, width, D, BD)
        squares = tl.zeros([BN], tl.float32)
        v = k
        if WEIGHT > 0:
            v = tile_of(v_base, v_key, lines, last, value_width, DV, BDV)
            wide = v.to(tl.float32)
            squares = tl.sum(wide * wide, 1)
        if ONE:
            part = _contributions(
                k, v, squares, q, high, low, length, sums, limit, loud, loud_odds, loud_gap, index, real, A, inner, outer, lines, last,
                CAUSAL, CAPPED, KNOWN, WEIGHT, DV, BDV, PRECISION,
            )  # fmt: skip
            score = _reduced(part, FACTORS, head, 0, lines, count, group, BM, BN, HEADS, MAXIMUM, L2)
        else:
            score = tl.zeros([BN], tl.float32)
            for block in range(0, blocks):
                newest = start
                if CAUSAL:  # a block whose queries all stand before these keys adds nothing
                    end = block * BM + BM - 1
                    newest = n - m + tl.where(end // per_head == block * BM // per_head, end % per_head, per_head - 1)
                if newest >= start:
                    q, high, low, length, sums, limit, loud, loud_odds, loud_gap, index, real = _rows_of(
                        Q, A, LSE, LOUD, LOUD_ODDS, LOUD_GAP, head, block, q_head, q_group, q_query, n, m, group, per_head,
                        BM, D, DV, BD, BDV, KNOWN, WEIGHT,
                    )  # fmt: skip
                    part = _contributions(
                        k, v, squares, q, high, low, length, sums, limit, loud, loud_odds, loud_gap, index, real, A, inner, outer, lines, last,
                        CAUSAL, CAPPED, KNOWN, WEIGHT, DV, BDV, PRECISION,
                    )  # fmt: skip
                    more = _reduced(part, FACTORS, head, block, lines, count, group, BM, BN, HEADS, MAXIMUM, L2)
                    score = tl.maximum(score, more) if MAXIMUM else score + more
        if not MAXIMUM:
            score = score / group
        if ROOT:
            score = tl.sqrt(score)
        tl.store(OUT + head * out_head + lines, score, mask=lines < last)


@triton.jit
def _reduced(
    part, FACTORS, head, block, lines, count, group,
    BM: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr, MAXIMUM: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """[BN] of [BN, BM], the rows put together."""
    if MAXIMUM:
        return tl.max(part, 1)
    if L2:
        by_head = tl.sqrt(tl.sum(tl.reshape(part * part, [BN, HEADS, BM // HEADS]), 2))
        own = block * HEADS + tl.arange(0, HEADS)
        place = (head * group + own[None, :]) * count + lines[:, None]
        inside = (own < group)[None, :] & (lines < count)[:, None]
        return tl.sum(by_head * tl.load(FACTORS + place, mask=inside, other=0.0), 1)
    return tl.sum(part, 1)
