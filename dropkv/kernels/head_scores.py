"""Several scores of the same queries in one pass over K and V (Triton), one number per query head and key, given their attention.

For what `dropkv.kernels.window_score` has no form of: a program holds a tile of keys and goes through one query head's queries, and everything
asked of p stays in registers. Keys with p > 1/2 are scored by what the attention pass knows of them. The plain-torch twin is
`dropkv.kernels.score.score_jobs`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropkv.kernels.projection import l2_norms
from dropkv.kernels.reduce import EMA
from dropkv.kernels.window_attend import (
    EPS,
    LN2,
    Attention,
    Tile,
    logit_factors,
    logits,
    precision_of,
    tile_of,
    width_of,
)

LOG2E = tl.constexpr(1.4426950408889634)

Kind = Literal[
    "max p", "mean p", "var p", "entropy", "max along", "sum of steps", "max step", "ema step", "max smoothed"
]  # fmt: skip
"""max, mean and unbiased variance of p over the queries; sum of -p ln(p + 1e-10); the largest p <a, v>; the sum of p / (1 - p + eps) * ||a - v||;
of p / (1 - p + eps) * ||(a - v) R||
the largest and the moving average, newest query last; the largest p averaged over 5 neighbours and scaled to its query's own mass."""

ORDER: tuple[Kind, ...] = ("max p", "mean p", "var p", "entropy", "max along", "sum of steps", "max step", "ema step")


def head_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention,
    kinds: Collection[Kind],
    *,
    scale: float,
    softcap: float | None = None,
    columns: int | None = None,
    roots: Tensor | None = None,
    tile: Tile | None = None,
) -> dict[Kind, Tensor]:
    """Scores float32 [kv_heads, G, columns] of every kind, for the first `columns` keys (all by default).

    q [kv_heads, G, m, d] are the queries of the last m of the n keys k [kv_heads, n, d], v [kv_heads, n, d_v]. attention: what
    `attend_window` made of them, with outputs and, for steps, residuals. roots [kv_heads, G, d_v, d_v] as in `dropkv.kernels.score.Window`,
    for steps. The last dimensions must be dense.
    """
    kv_heads, group, m, d = q.shape
    n, d_v = v.shape[1:]
    count = n if columns is None else columns
    if tile is None:
        width, wide = max(d, d_v), q.dtype == torch.float32
        most = 32 if wide or width > 64 else 64
        tile = Tile(min(most, max(16, triton.next_power_of_2(m))), 32 if wide else 64, 8 if width > 128 else 4, 1)
    inner, outer = logit_factors(scale, softcap)
    causal = count > n - m + 1
    found: dict[Kind, Tensor] = {}
    sums = attention.log_sum_exp.contiguous()
    strides = (q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1))
    sizes = {"D": d, "BD": width_of(d), "CAUSAL": causal, "CAPPED": softcap is not None, "PRECISION": precision_of(q)}
    tiles = (triton.cdiv(count, tile.keys), kv_heads * group)
    spread = "mean p" in kinds or "var p" in kinds
    asked: list[Kind] = [
        kind for kind in ORDER if kind in kinds or (spread and kind in ("mean p", "var p"))
    ]  # as the kernel stores them
    if asked and count:
        out = torch.empty((len(asked), kv_heads, group, count), dtype=torch.float32, device=q.device)
        along, step = "max along" in kinds, "max step" in kinds or "ema step" in kinds
        summed = "sum of steps" in kinds
        outputs = attention.outputs if along or step or summed else sums
        turned, lengths, gaps, keys, shares = sums, sums, sums, sums, sums
        if step:
            assert roots is not None and attention.residuals is not None and attention.outputs is not None
            turned, lengths, gaps, keys = _projected(attention.outputs, attention.residuals, v[:, :count], roots)
            shares = _shares(m, q.device)
        _scores[tiles](
            q, k, v, outputs, sums, attention.loud, attention.loud_odds, attention.loud_gap, turned, lengths, gaps, keys, shares, out, inner, outer,
            *strides, v.stride(0), v.stride(1), n, count, m, group, out.stride(0), DV=d_v, BDV=width_of(d_v), BM=tile.rows, BN=tile.keys,
            MAX="max p" in kinds, SPREAD=spread, ENTROPY="entropy" in kinds, ALONG=along, SUM=summed,
            STEP="max step" in kinds, EMA_STEP="ema step" in kinds, num_warps=tile.warps, num_stages=tile.stages, **sizes,
        )  # fmt: skip
        found.update(zip(asked, out, strict=True))
    if "max smoothed" in kinds:
        smoothed = torch.empty((kv_heads, group, count), dtype=torch.float32, device=q.device)
        back = torch.empty_like(sums)
        if count:
            _scale_back[(triton.cdiv(m, tile.rows), kv_heads * group)](
                q, k, sums, back, inner, outer, *strides, n, count, m, group,
                BM=tile.rows, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **sizes,
            )  # fmt: skip
            _smoothed[tiles](
                q, k, sums, back, smoothed, inner, outer, *strides, n, count, m, group,
                BM=tile.rows, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **sizes,
            )  # fmt: skip
        found["max smoothed"] = smoothed
    return found


def _projected(
    outputs: Tensor, residuals: Tensor, values: Tensor, roots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ||(a - v) R||^2 = ||a R||^2 - 2 <a R R^T, v> + ||v R||^2 is made of: a R R^T [h, G, m, d_v], ||a R||^2 [h, G, m], the loud keys' own
    squares [h, G, m], and ||v R||^2 [h, G, c]."""
    behind = outputs @ roots
    squares = l2_norms(values, roots).square_()
    loud = (residuals @ roots).norm(dim=-1).square_()
    return behind @ roots.transpose(2, 3), behind.norm(dim=-1).square_(), loud, squares


def _shares(m: int, device: torch.device) -> Tensor:
    """The weight of every query in a moving average that starts as its oldest value."""
    shares = EMA * (1 - EMA) ** torch.arange(m - 1, -1, -1, dtype=torch.float32, device=device)
    shares[:1] /= EMA
    return shares


@triton.jit
def _weights(
    k, Q, LSE, head, query, lines, m, limit, inner, outer, q_query,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p [keys, queries] of a tile of keys for one block of a head's queries; 0 beyond the last query."""
    q = tile_of(Q, q_query, query, m, tl.arange(0, BD), D, BD)
    sums = tl.load(LSE + head * m + query, mask=query < m, other=float("inf"))
    sums = tl.where(sums == -float("inf"), float("inf"), sums) * LOG2E
    s = logits(tl.dot(k, tl.trans(q), input_precision=PRECISION), inner, outer, CAPPED)
    p = tl.exp2(s - sums[None, :])
    if CAUSAL:
        p = tl.where(lines[:, None] <= limit[None, :], p, 0.0)
    return p


@triton.jit
def _against(v, x, PRECISION: tl.constexpr):
    """Products of values [keys, d_v] with float32 rows x [queries, d_v], which go in as two numbers of V's type."""
    high = x.to(v.dtype)
    product = tl.dot(v, tl.trans(high), input_precision=PRECISION)
    if v.dtype != tl.float32:
        product = tl.dot(v, tl.trans((x - high.to(tl.float32)).to(v.dtype)), product)
    return product


@triton.jit(do_not_specialize=["n", "count", "m", "group"])
def _scores(
    Q, K, V, A, LSE, LOUD, LOUD_ODDS, LOUD_GAP, TURNED, LENGTHS, GAPS, SQUARES, SHARES, OUT, inner, outer,
    q_head, q_group, q_query, k_head, k_key, v_head, v_key, n, count, m, group, out_kind,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MAX: tl.constexpr, SPREAD: tl.constexpr, ENTROPY: tl.constexpr, ALONG: tl.constexpr, SUM: tl.constexpr, STEP: tl.constexpr,
    EMA_STEP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // group
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    value_width = tl.arange(0, BDV)
    k = tile_of(K + kv_head * k_head, k_key, lines, count, tl.arange(0, BD), D, BD)
    v = k
    squares = tl.zeros([BN], tl.float32)
    if ALONG or SUM or STEP or EMA_STEP:
        v = tile_of(V + kv_head * v_head, v_key, lines, count, value_width, DV, BDV)
    if STEP or EMA_STEP:
        squares = tl.load(SQUARES + head * count + lines, mask=lines < count, other=0.0)
    queries = Q + kv_head * q_head + (head % group) * q_group
    largest = tl.zeros([BN], tl.float32)
    mean = largest
    spread = largest
    entropy = largest
    farthest = largest
    moving = largest
    summed = largest
    along = tl.full([BN], -float("inf"), tl.float32)
    own_squares = largest
    if SUM:
        wide = v.to(tl.float32)
        own_squares = tl.sum(wide * wide, 1)
    for start in range(0, m, BM):
        query = start + tl.arange(0, BM)
        real = query < m
        p = _weights(
            k,
            queries,
            LSE,
            head,
            query,
            lines,
            m,
            n - m + query,
            inner,
            outer,
            q_query,
            D,
            BD,
            CAUSAL,
            CAPPED,
            PRECISION,
        )
        if MAX:
            largest = tl.maximum(largest, tl.max(p, 1))
        if (
            SPREAD
        ):  # mean and squared deviations of two sets of queries merged: differences of large sums are never taken
            size = tl.minimum(m - start, BM).to(tl.float32)
            own = tl.sum(p, 1) / size
            gap = tl.where(real[None, :], p - own[:, None], 0.0)
            step = own - mean
            share = size / (start + size)
            spread += tl.sum(gap * gap, 1) + step * step * (start * share)
            mean += step * share
        if ENTROPY:
            entropy -= tl.sum(p * tl.log2(p + 1e-10), 1)
        index = head * m + query
        place = index[:, None] * DV + value_width[None, :]
        inside = real[:, None] & (value_width < DV)[None, :]
        if SUM or STEP or EMA_STEP:
            loud = tl.load(LOUD + index, mask=real, other=-1)
            here = lines[:, None] == loud[None, :]
            odds = p / (tl.maximum(1.0 - p, 0.0) + EPS)
            odds = tl.where(here, tl.load(LOUD_ODDS + index, mask=real, other=0.0)[None, :], odds)
        if ALONG or SUM:
            a = tl.load(A + place, mask=inside, other=0.0)
            product = _against(v, a, PRECISION)
            if ALONG:
                along = tl.maximum(along, tl.max(tl.where(real[None, :], p * product, -float("inf")), 1))
            if SUM:
                distance = tl.maximum(own_squares[:, None] + tl.sum(a * a, 1)[None, :] - 2.0 * product, 0.0)
                distance = tl.where(here, tl.load(LOUD_GAP + index, mask=real, other=0.0)[None, :], distance)
                summed += tl.sum(odds * tl.sqrt(distance), 1)
        if STEP or EMA_STEP:
            length = tl.load(LENGTHS + index, mask=real, other=0.0)
            turned = tl.load(TURNED + place, mask=inside, other=0.0)
            distance = squares[:, None] + length[None, :] - 2.0 * _against(v, turned, PRECISION)
            distance = tl.where(here, tl.load(GAPS + index, mask=real, other=0.0)[None, :], tl.maximum(distance, 0.0))
            distance = odds * odds * distance
            if STEP:
                farthest = tl.maximum(farthest, tl.max(distance, 1))
            if EMA_STEP:
                moving += tl.sum(tl.sqrt(distance) * tl.load(SHARES + query, mask=real, other=0.0)[None, :], 1)
    out = OUT + head * count + lines
    mask = lines < count
    if MAX:
        tl.store(out, largest, mask=mask)
        out += out_kind
    if SPREAD:
        tl.store(out, mean, mask=mask)
        tl.store(out + out_kind, spread / tl.maximum(m - 1, 1).to(tl.float32), mask=mask)
        out += 2 * out_kind
    if ENTROPY:
        tl.store(out, entropy * LN2, mask=mask)
        out += out_kind
    if ALONG:
        tl.store(out, along, mask=mask)
        out += out_kind
    if SUM:
        tl.store(out, summed, mask=mask)
        out += out_kind
    if STEP:
        tl.store(out, tl.sqrt(farthest), mask=mask)
        out += out_kind
    if EMA_STEP:
        tl.store(out, moving, mask=mask)


@triton.jit(do_not_specialize=["n", "count", "m", "group"])
def _scale_back(
    Q, K, LSE, OUT, inner, outer, q_head, q_group, q_query, k_head, k_key, n, count, m, group,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For every query its mass on the scored keys, divided by what averaging over neighbours leaves of it: a key near an end gives some away."""
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // group
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    limit = n - m + query
    newest = tl.minimum(limit, count - 1)  # the last scored key that a query sees
    mass = tl.zeros([BM], tl.float32)
    lost = mass
    for start in range(0, count, BN):
        lines = start + tl.arange(0, BN)
        k = tile_of(K + kv_head * k_head, k_key, lines, count, tl.arange(0, BD), D, BD)
        p = _weights(
            k, Q + kv_head * q_head + (head % group) * q_group, LSE, head, query, lines, m, limit, inner, outer, q_query,
            D, BD, CAUSAL, CAPPED, PRECISION,
        )  # fmt: skip
        p = tl.where((lines < count)[:, None], p, 0.0)
        outside = tl.maximum(2 - lines, 0)[:, None] + tl.maximum(lines[:, None] + 2 - newest[None, :], 0)
        mass += tl.sum(p, 0)
        lost += tl.sum(p * outside.to(tl.float32), 0)
    tl.store(OUT + head * m + query, mass / tl.maximum(mass - lost * 0.2, 1e-30), mask=query < m)


@triton.jit(do_not_specialize=["n", "count", "m", "group"])
def _smoothed(
    Q, K, LSE, BACK, OUT, inner, outer, q_head, q_group, q_query, k_head, k_key, n, count, m, group,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // group
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    best = tl.zeros([BN], tl.float32)
    for start in range(0, m, BM):
        query = start + tl.arange(0, BM)
        own = tl.zeros([BN, BM], tl.float32)
        total = own
        for shift in tl.static_range(-2, 3):
            near = lines + shift
            inside = (near >= 0) & (near < count)
            k = tile_of(K + kv_head * k_head, k_key, tl.where(inside, near, count), count, tl.arange(0, BD), D, BD)
            p = _weights(
                k, Q + kv_head * q_head + (head % group) * q_group, LSE, head, query, near, m, n - m + query, inner, outer, q_query,
                D, BD, CAUSAL, CAPPED, PRECISION,
            )  # fmt: skip
            p = tl.where(inside[:, None], p, 0.0)
            total += p
            if shift == 0:
                own = p
        back = tl.load(BACK + head * m + query, mask=query < m, other=0.0)
        best = tl.maximum(best, tl.max(tl.where(own > 0, total * 0.2 * back[None, :], 0.0), 1))
    tl.store(OUT + head * count + lines, best, mask=lines < count)
