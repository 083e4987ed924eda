"""Attention of a few queries over many keys in one pass over K and V (Triton): outputs, log-sum-exps, and what the score of a key with p > 1/2
needs. The plain-torch twin is `dropkv.kernels.score.Window`.

The keys are split over programs, whose parts are merged. A row (a query of a query head) holds back a key that outweighs all others met so
far and leaves it out of its sums: with p near 1 that key's 1 - p is the sum of all other weights, and a - v is made of the other keys alone,
so neither cancels. The key is put back when another one outweighs all, which is rare.

Precision: logits and sums are float32; weights go into the product with V as two numbers of V's type, which together hold 16 bits or more
(those of float16 enlarged, since it has no small numbers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
EPS = tl.constexpr(1e-6)


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: query rows and keys of a tile (powers of two, at least 16), warps, stages of its pipeline, programs a multiprocessor."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 2


@dataclass(frozen=True)
class Attention:
    """What queries [kv_heads, G, m] got of the keys they see.

    outputs float32 [kv_heads, G, m, d_v], None where only sums were asked; log_sum_exp float32 [kv_heads, G, m], -inf for a query that sees
    nothing. loud int32 [kv_heads, G, m]: the key with p > 1/2, -1 where there is none; loud_odds: its p / (1 - p + eps), loud_gap: its
    ||a - v||^2, both float32 and free of cancellation. These three are None where the attention came from elsewhere. residuals float32
    [kv_heads, G, m, d_v]: that key's a - v itself, of no meaning where there is none; only if asked.
    """

    outputs: Tensor | None
    log_sum_exp: Tensor
    loud: Tensor | None = None
    loud_odds: Tensor | None = None
    loud_gap: Tensor | None = None
    residuals: Tensor | None = None

    def part(self, queries: slice) -> Attention:
        """That of some of every query head's queries."""
        parts = {name: part[:, :, queries].contiguous() for name, part in vars(self).items() if part is not None}
        return Attention(**({"outputs": None} | parts))


def attend_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    values: bool = True,
    residuals: bool = False,
    tile: Tile | None = None,
) -> Attention:
    """Attention of q [kv_heads, G, m, d], the queries of the last m keys, over k [kv_heads, n, d] and v [kv_heads, n, d_v]; causal.

    The last dimension of each must be dense. values: False leaves V unread and gives log-sum-exps alone. residuals: whether those are given
    too. A query before the first key (m > n) sees nothing: its output is 0.
    """
    kv_heads, group, m, d = q.shape
    n, d_v = v.shape[1:]
    tile = tile or attend_tile(q, d_v, values)
    blocks = triton.cdiv(group * m, tile.rows)
    parts = max(1, min(triton.cdiv(n, tile.keys), programs_of(q, tile) // (kv_heads * blocks)))
    span = triton.cdiv(triton.cdiv(n, tile.keys), parts) * tile.keys
    parts = max(1, triton.cdiv(n, span))
    rows = group * m
    sums = torch.empty((4, kv_heads, parts, rows), dtype=torch.float32, device=q.device)
    partial = torch.empty((kv_heads, parts, rows, d_v if values else 0), dtype=torch.float32, device=q.device)
    inner, outer = logit_factors(scale, softcap)
    sizes = {
        "D": d, "DV": d_v, "BD": width_of(d), "BDV": width_of(d_v), "VALUES": values,
    }  # fmt: skip
    _attend[(parts, kv_heads, blocks)](
        q, k, v, sums, partial, inner, outer, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        n, m, group, span, parts, kv_heads, rows, BM=tile.rows, BN=tile.keys, CAPPED=softcap is not None, **sizes,
        BOOST=32768.0 if v.dtype == torch.float16 else 1.0, PRECISION=precision_of(q),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    shape = (kv_heads, group, m)
    outputs = torch.empty((*shape, d_v if values else 0), dtype=torch.float32, device=q.device)
    found = torch.empty((3, *shape), dtype=torch.float32, device=q.device)
    loud = torch.empty(shape, dtype=torch.int32, device=q.device)
    gaps = torch.empty_like(outputs) if residuals else None
    _merge[(rows, kv_heads)](
        v, sums, partial, outputs, found, loud, gaps, v.stride(0), v.stride(1), parts, kv_heads, rows,
        PARTS=triton.next_power_of_2(parts), GAPS=residuals, SOME=min(64, triton.next_power_of_2(parts)), **sizes, num_warps=4,
    )  # fmt: skip
    return Attention(outputs if values else None, found[0], loud, found[1], found[2], gaps)


def attend_tile(q: Tensor, d_v: int, values: bool) -> Tile:
    """A tile that suits the inputs."""
    rows = 64 if q.shape[1] * q.shape[2] > 32 else 32 if q.shape[1] * q.shape[2] > 16 else 16
    wide = max(q.shape[-1], d_v) > 128
    if q.dtype == torch.float32:
        return fitting(Tile(rows, 32, 8 if wide else 4, 2), q, d_v)
    return fitting(Tile(rows, 32 if wide else 64, 4, 3), q, d_v)


def fitting(tile: Tile, q: Tensor, d_v: int) -> Tile:
    """The tile with as many stages, and then keys, as the device's shared memory holds."""
    if not q.is_cuda:
        return tile
    room = card(q.device)[1] - 4096
    row = (width_of(q.shape[-1]) + 2 * width_of(d_v)) * q.element_size()
    while tile.rows * row + tile.stages * tile.keys * row > room and tile.keys > 16:
        tile = replace(tile, stages=tile.stages - 1) if tile.stages > 1 else replace(tile, keys=tile.keys // 2)
    return tile


def programs_of(q: Tensor, tile: Tile) -> int:
    """How many programs fill the device; a few under the interpreter, so that merging is tried."""
    if not q.is_cuda:
        return 3 * q.shape[0]
    return card(q.device)[0] * tile.programs


@cache
def card(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and the shared memory that one program may have."""
    found = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(found["multiprocessor_count"]), int(found["max_shared_mem"])


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What `logits` multiplies products and capped products with, so that exp2 of a logit is its weight."""
    if softcap is None:
        return scale * LOG2E, 1.0
    return 2 * LOG2E * scale / softcap, softcap * LOG2E


def precision_of(q: Tensor) -> str:
    """How products of float32 tiles are made: of three parts on tensor cores, which leaves float32's digits."""
    return "tf32x3" if q.dtype == torch.float32 and q.is_cuda else "ieee"


def width_of(d: int) -> int:
    """A power of two that holds d numbers, as products of tiles need it."""
    return max(16, int(triton.next_power_of_2(d)))


@triton.jit
def logits(products, inner, outer, CAPPED: tl.constexpr):
    """Scaled products in powers of two; soft-capped ones by tanh(x) = 1 - 2 / (1 + exp(2 x))."""
    x = products * inner
    if CAPPED:
        x = outer * (1.0 - 2.0 / (1.0 + tl.exp2(x)))
    return x


@triton.jit
def tile_of(base, stride, lines, last, width, D: tl.constexpr, BD: tl.constexpr):
    """Rows `lines` [BN, BD] of a matrix, zeros from `last` on and beyond D."""
    place = lines[:, None].to(tl.int64) * stride + width[None, :]
    if BD == D:
        return tl.load(base + place, mask=(lines < last)[:, None], other=0.0)
    return tl.load(base + place, mask=(lines < last)[:, None] & (width < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["n", "m", "group", "span", "parts", "kv_heads", "rows"])
def _attend(
    Q, K, V, SUMS, PARTIAL, inner, outer, q_head, q_group, q_query, k_head, k_key, v_head, v_key,
    n, m, group, span, parts, kv_heads, rows,
    BM: tl.constexpr, BN: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    VALUES: tl.constexpr, BOOST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, head, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = block * BM + tl.arange(0, BM)
    query_head, query = row // m, row % m
    real = query_head < group
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    place = query_head[:, None].to(tl.int64) * q_group + query[:, None].to(tl.int64) * q_query + width[None, :]
    q = tl.load(Q + head * q_head + place, mask=real[:, None] & (width < D)[None, :], other=0.0)
    limit = tl.where(real, n - m + query, -1)  # the last key a row sees
    first = part * span
    last = tl.minimum(tl.minimum(n, first + span), tl.max(limit, 0) + 1)
    k_base, v_base = K + head * k_head, V + head * v_head

    best = tl.full([BM], -float("inf"), tl.float32)
    base = tl.zeros([BM], tl.float32)  # the same, or 0 while nothing was seen
    held = tl.full([BM], -1, tl.int32)  # the key held back, and its logit
    held_logit = best
    others = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    for start in range(first, last, BN):
        lines = start + tl.arange(0, BN)
        k = tile_of(k_base, k_key, lines, last, width, D, BD)
        s = logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), inner, outer, CAPPED)
        s = tl.where((lines[None, :] <= limit[:, None]) & (lines < last)[None, :], s, -float("inf"))
        top = tl.max(s, 1)
        new = tl.maximum(best, top)
        base = tl.where(new == -float("inf"), 0.0, new)
        fade = tl.exp2(best - base)
        best = new
        weights = tl.exp2(s - base[:, None]) * BOOST
        more = tl.sum(weights, 1)
        others = others * fade
        if VALUES:
            acc = acc * fade[:, None]
        held_weight = tl.exp2(held_logit - base) * BOOST
        outweighs = tl.exp2(top - base) * (2 * BOOST) > others + more + held_weight
        if tl.max(outweighs.to(tl.int32), 0) > 0:
            back = tl.where(outweighs, held_weight, 0.0)
            others += back
            if VALUES:
                known = outweighs & (held >= 0)
                old = tl.load(
                    v_base + held[:, None].to(tl.int64) * v_key + value_width[None, :],
                    mask=known[:, None] & (value_width < DV)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                acc += back[:, None] * old
            held = tl.where(outweighs, start + tl.argmax(s, 1), held)
            held_logit = tl.where(outweighs, top, held_logit)
            weights = tl.where(lines[None, :] == held[:, None], 0.0, weights)
            more = tl.sum(weights, 1)
        others += more
        if VALUES:
            v = tile_of(v_base, v_key, lines, last, value_width, DV, BDV)
            high = weights.to(v.dtype)
            acc = tl.dot(high, v, acc, input_precision=PRECISION)
            if v.dtype != tl.float32:
                acc = tl.dot((weights - high.to(tl.float32)).to(v.dtype), v, acc)
    here = (head * parts + part) * rows + row
    size = kv_heads.to(tl.int64) * parts * rows
    tl.store(SUMS + here, best, mask=real)
    tl.store(SUMS + size + here, others / BOOST, mask=real)
    tl.store(SUMS + 2 * size + here, held.to(tl.float32, bitcast=True), mask=real)
    tl.store(SUMS + 3 * size + here, held_logit, mask=real)
    if VALUES:
        tl.store(
            PARTIAL + here[:, None] * DV + value_width[None, :],
            acc / BOOST,
            mask=real[:, None] & (value_width < DV)[None, :],
        )


@triton.jit(do_not_specialize=["parts", "kv_heads", "rows"])
def _merge(
    V, SUMS, PARTIAL, OUT, FOUND, LOUD, RESIDUALS, v_head, v_key, parts, kv_heads, rows,
    PARTS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VALUES: tl.constexpr,
    GAPS: tl.constexpr,
):  # fmt: skip
    """All parts of one row put together."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    width = tl.arange(0, BDV)
    size = kv_heads.to(tl.int64) * parts * rows
    part = tl.arange(0, PARTS)
    here = (head * parts + part) * rows + row
    tops = tl.load(SUMS + here, mask=part < parts, other=-float("inf"))
    rest = tl.load(SUMS + size + here, mask=part < parts, other=0.0)
    keys = tl.load(SUMS + 2 * size + here, mask=part < parts, other=0.0).to(tl.int32, bitcast=True)
    held_logits = tl.load(SUMS + 3 * size + here, mask=part < parts, other=-float("inf"))
    best = tl.max(tops, 0)
    seen = best > -float("inf")
    base = tl.where(seen, best, 0.0)
    largest = tl.max(held_logits, 0)  # of the keys held back: the others are put back
    winner = tl.argmax(held_logits, 0)
    held = tl.sum(tl.where(part == winner, keys, 0), 0)
    weight = tl.exp2(largest - base)
    others = tl.sum(tl.exp2(tops - base) * rest + tl.where(part == winner, 0.0, tl.exp2(held_logits - base)), 0)
    total = tl.where(seen, others + weight, 1.0)
    loud = seen & (others < weight)  # p > 1/2
    index = head * rows + row
    tl.store(FOUND + index, tl.where(seen, (base + tl.log2(total)) * LN2, -float("inf")))
    tl.store(LOUD + index, tl.where(loud, held, -1))
    found = kv_heads.to(tl.int64) * rows
    tl.store(FOUND + found + index, weight / (others + EPS * total))
    if VALUES:
        acc = tl.zeros([BDV], tl.float32)
        wide = (width < DV)[None, :]
        for start in range(0, parts, SOME):
            few = start + tl.arange(0, SOME)
            at = (head * parts + few) * rows + row
            fade = tl.exp2(tl.load(SUMS + at, mask=few < parts, other=-float("inf")) - base)
            back = tl.exp2(tl.load(SUMS + 3 * size + at, mask=few < parts, other=-float("inf")) - base)
            back = tl.where(few == winner, 0.0, back)
            own = tl.load(SUMS + 2 * size + at, mask=few < parts, other=0.0).to(tl.int32, bitcast=True)
            sums = tl.load(PARTIAL + at[:, None] * DV + width[None, :], mask=(few < parts)[:, None] & wide, other=0.0)
            olds = V + head * v_head + own[:, None].to(tl.int64) * v_key + width[None, :]
            old = tl.load(olds, mask=(back > 0)[:, None] & wide, other=0.0).to(tl.float32)
            acc += tl.sum(fade[:, None] * sums + back[:, None] * old, 0)
        place = V + head * v_head + held.to(tl.int64) * v_key + width
        own_value = tl.load(place, mask=(width < DV) & (tl.zeros([BDV], tl.int32) + held >= 0), other=0.0).to(
            tl.float32
        )
        gap = (acc - others * own_value) / total
        tl.store(FOUND + 2 * found + index, tl.sum(gap * gap, 0))
        if GAPS:
            tl.store(RESIDUALS + index * DV + width, gap, mask=width < DV)
        outputs = tl.where(seen, (acc + weight * own_value) / total, 0.0)
        tl.store(OUT + index * DV + width, outputs, mask=width < DV)
