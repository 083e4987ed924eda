"""Kernels of decode_attention.py: those of dropkv.kernels.fused_decode without windows, soft caps and other head sizes, that may start early.

EARLY: programmatic dependent launch. A kernel begins as soon as every program of the one before has said so, and waits inside for what it needs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _lean(s, v, biggest, total, acc, factor):
    new = tl.maximum(biggest, tl.max(s, 1))
    base = tl.where(new == -float("inf"), 0.0, new) * factor
    weights = tl.exp2(s * factor - base[:, None])
    fade = tl.exp2(biggest * factor - base)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new, total, acc


@triton.jit
def over_prefix(
    Q, TABLE, CHUNKS, TILES, ORDER, OUT, SUMS, factor, q_row, q_head, table_prefix, chunks_prefix, rows,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `_over_prefix`; the tails may begin once all programs run."""
    if EARLY:
        gdc_launch_dependents()
    chunk, tile = tl.program_id(0), tl.program_id(1)
    prefix, first, count = tl.load(TILES + tile * 3), tl.load(TILES + tile * 3 + 1), tl.load(TILES + tile * 3 + 2)
    if count == 0:
        return
    place = CHUNKS + prefix.to(tl.int64) * chunks_prefix + chunk * 3
    head, start, stop = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    if start == stop:
        return
    entry = TABLE + prefix.to(tl.int64) * table_prefix
    keys = tl.load(entry).to(tl.pointer_type(Q.dtype.element_ty))
    values = tl.load(entry + 1).to(tl.pointer_type(Q.dtype.element_ty))
    keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    line = tl.arange(0, BM)
    real = line < count * GROUP
    row = tl.load(ORDER + first + line // GROUP, mask=real, other=0).to(tl.int64)
    member = line % GROUP
    width = tl.arange(0, D)
    value_width = tl.arange(0, DV)
    q = tl.load(
        Q + row[:, None] * q_row + (head * GROUP + member)[:, None] * q_head + width[None, :],
        mask=real[:, None],
        other=0.0,
    )
    biggest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    whole = start + (stop - start) // BN * BN
    column = tl.arange(0, BN)
    k_place = keys + (start + column)[:, None].to(tl.int64) * D + width[None, :]
    v_place = values + (start + column)[:, None].to(tl.int64) * DV + value_width[None, :]
    for _ in tl.range(start, whole, BN, num_stages=STAGES):
        k = tl.load(k_place)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = tl.load(v_place)
        biggest, total, acc = _lean(s, v, biggest, total, acc, factor)
        k_place += BN * D
        v_place += BN * DV
    if whole < stop:
        inside = whole + column < stop
        k = tl.load(k_place, mask=inside[:, None], other=0.0)
        s = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), -float("inf"))
        v = tl.load(v_place, mask=inside[:, None], other=0.0)
        biggest, total, acc = _lean(s, v, biggest, total, acc, factor)
    target = (chunk.to(tl.int64) * rows + row) * GROUP + member
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(OUT + target[:, None] * DV + value_width[None, :], out, mask=real[:, None])
    tl.store(
        SUMS + target, tl.where(some, biggest * factor + tl.log2(tl.where(some, total, 1.0)), -float("inf")), mask=real
    )


@triton.jit
def tails_and_merge(
    Q, KEYS, VALUES, SLOTS, LENGTHS, FAR, FAR_SUMS, WHOSE, HEADS, OUT, factor, q_row, q_head, k_row, k_head, v_row, v_head,
    heads_prefix, rows, o_row, o_head,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The tail of one row and KV head, and, once the prefix is done, what both are together: no third kernel."""
    row, head = tl.program_id(0), tl.program_id(1)
    stop = tl.load(LENGTHS + row) + 1
    line = tl.arange(0, BM)
    real = line < GROUP
    width, value_width = tl.arange(0, D), tl.arange(0, DV)
    q = tl.load(
        Q + row.to(tl.int64) * q_row + (head * GROUP + line)[:, None] * q_head + width[None, :],
        mask=real[:, None],
        other=0.0,
    )
    slot = tl.load(SLOTS + row).to(tl.int64)
    keys = KEYS + slot * k_row + head * k_head
    values = VALUES + slot * v_row + head * v_head
    biggest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    for at in tl.range(0, stop, BN, num_stages=STAGES):
        lines = at + tl.arange(0, BN)
        inside = lines < stop
        k = tl.load(keys + lines[:, None] * D + width[None, :], mask=inside[:, None], other=0.0)
        s = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), -float("inf"))
        v = tl.load(values + lines[:, None] * DV + value_width[None, :], mask=inside[:, None], other=0.0)
        biggest, total, acc = _lean(s, v, biggest, total, acc, factor)
    biggest = biggest * factor
    place = HEADS + tl.load(WHOSE + row).to(tl.int64) * heads_prefix + head
    first, last = tl.load(place), tl.load(place + 1)
    if EARLY:
        gdc_wait()
    for member in tl.static_range(GROUP):
        mine = line == member
        most = tl.max(tl.where(mine, biggest, -float("inf")), 0)
        sum_ = tl.sum(tl.where(mine, total, 0.0), 0)
        near = tl.sum(tl.where(mine[:, None], acc, 0.0), 0)
        for begin in range(first, last, BC):
            chunks = begin + tl.arange(0, BC)
            far_place = (chunks.to(tl.int64) * rows + row) * GROUP + member
            far_sums = tl.load(FAR_SUMS + far_place, mask=chunks < last, other=-float("inf"))
            far = tl.load(
                FAR + far_place[:, None] * DV + value_width[None, :], mask=(chunks < last)[:, None], other=0.0
            )
            new = tl.maximum(most, tl.max(far_sums, 0))
            fade = tl.exp2(most - new)
            weights = tl.exp2(far_sums - new)
            sum_ = sum_ * fade + tl.sum(weights, 0)
            near = near * fade + tl.sum(weights[:, None] * far, 0)
            most = new
        tl.store(
            OUT + row.to(tl.int64) * o_row + (head * GROUP + member) * o_head + value_width,
            (near / sum_).to(OUT.dtype.element_ty),
        )


@triton.jit
def over_tails(
    Q, KEYS, VALUES, SLOTS, LENGTHS, OUT, SUMS, factor, q_row, q_head, k_row, k_head, v_row, v_head, rows, heads,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """As `_over_tails`; the merging may begin once all programs are here at their end."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(LENGTHS + row) + 1
    each = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    start = split * each
    stop = tl.minimum(start + each, length)
    line = tl.arange(0, BM)
    real = line < GROUP
    width, value_width = tl.arange(0, D), tl.arange(0, DV)
    q = tl.load(
        Q + row.to(tl.int64) * q_row + (head * GROUP + line)[:, None] * q_head + width[None, :],
        mask=real[:, None],
        other=0.0,
    )
    slot = tl.load(SLOTS + row).to(tl.int64)
    keys = KEYS + slot * k_row + head * k_head
    values = VALUES + slot * v_row + head * v_head
    biggest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    for at in tl.range(start, stop, BN, num_stages=STAGES):
        lines = at + tl.arange(0, BN)
        inside = lines < stop
        k = tl.load(keys + lines[:, None] * D + width[None, :], mask=inside[:, None], other=0.0)
        s = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), -float("inf"))
        v = tl.load(values + lines[:, None] * DV + value_width[None, :], mask=inside[:, None], other=0.0)
        biggest, total, acc = _lean(s, v, biggest, total, acc, factor)
    target = (split * rows + row).to(tl.int64) * heads + head * GROUP + line
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(OUT + target[:, None] * DV + value_width[None, :], out, mask=real[:, None])
    tl.store(
        SUMS + target, tl.where(some, biggest * factor + tl.log2(tl.where(some, total, 1.0)), -float("inf")), mask=real
    )
    if EARLY:
        gdc_launch_dependents()
        if row + head + split == 0:  # one program that waits keeps this kernel from being done before the prefix is
            gdc_wait()


@triton.jit
def merge(
    FAR, FAR_SUMS, NEAR, NEAR_SUMS, WHOSE, HEADS, OUT, heads_prefix, rows, heads, o_row, o_head,
    GROUP: tl.constexpr, DV: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `_merge`, for tails that are not split."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = HEADS + tl.load(WHOSE + row).to(tl.int64) * heads_prefix + head // GROUP
    first, last = tl.load(place), tl.load(place + 1)
    value_width = tl.arange(0, DV)
    if EARLY:
        gdc_wait()
    near_place = row.to(tl.int64) * heads + head
    most = tl.load(NEAR_SUMS + near_place)
    acc = tl.load(NEAR + near_place * DV + value_width).to(tl.float32)
    total = 1.0
    for begin in range(first, last, BC):
        chunks = begin + tl.arange(0, BC)
        far_place = (chunks.to(tl.int64) * rows + row) * GROUP + head % GROUP
        far_sums = tl.load(FAR_SUMS + far_place, mask=chunks < last, other=-float("inf"))
        far = tl.load(FAR + far_place[:, None] * DV + value_width[None, :], mask=(chunks < last)[:, None], other=0.0)
        new = tl.maximum(most, tl.max(far_sums, 0))
        fade = tl.exp2(most - new)
        weights = tl.exp2(far_sums - new)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(weights[:, None] * far, 0)
        most = new
    tl.store(OUT + row.to(tl.int64) * o_row + head * o_head + value_width, (acc / total).to(OUT.dtype.element_ty))
