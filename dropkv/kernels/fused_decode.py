"""One decode step's attention of a batch, in Triton: ragged prefixes that rows share, and every row's own tail.

Three kernels. Over the prefix, the queries of all rows of one prefix and of one KV head's group are the rows of one tile, so that every entry is
read once for the whole batch; a prefix is cut into chunks of about equal size, however unequal its heads are. Over the tails, a program has the
queries of one row and group. Both leave normalised outputs, rounded as the result will be, and log-sum-exps (base 2, float32), which the third
puts together.

Products over the prefix take the time, and reading the tails: both at once is what makes it fast. EARLY: from compute capability 9 on a kernel may
begin when every program of the one before runs (programmatic dependent launch). Tails begin so behind the prefix, whose large programs must be placed
first, and the last kernel waits where it needs what both have left. Elsewhere tails have a stream of their own.

Where prefixes lie, which rows belong to which, and how long tails are is read from device memory: a captured graph serves every step. Offsets
inside a prefix and tail lengths are int32. The plain-torch twin is `dropkv.kernels.rows`.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = 1.4426950408889634
SHARED = 200_000  # bytes of shared memory that a program may take where a GPU does not tell
LARGE = 128  # queries of a tile from which on products take longer than reading
RESERVED = 4096  # bytes of it that are not for entries


@dataclass(frozen=True)
class Blocks:
    """How a kernel works on entries: so many at a time, loaded so many steps ahead, by so many warps, with so many registers a thread."""

    columns: int
    stages: int
    warps: int
    registers: int | None = None

    def fitting(self, tile: int, width: int, itemsize: int, shared: int) -> Blocks:
        """The same, with less at a time where rows of a tile and entries, keys and values together `width` wide, would not fit into so many bytes."""
        columns, stages = self.columns, self.stages
        while itemsize * (tile * width // 2 + stages * columns * width) > shared and columns > 16:
            columns, stages = (columns, stages - 1) if stages > 2 else (columns // 2, stages)
        return replace(self, columns=columns, stages=stages)


FEW, MANY, TAILS = (
    Blocks(64, 3, 4),
    Blocks(64, 3, 8, 168),
    Blocks(64, 2, 4),
)  # MANY leaves registers for programs of TAILS beside it


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory for a program's entries."""
    if device.type != "cuda":
        return SHARED
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED) - RESERVED


def begins_early(device: torch.device) -> bool:
    """Whether a kernel on this device may begin before the one before it is done."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def tile_of(d: int, itemsize: int) -> int:
    """Queries of a tile for heads of d dimensions: 128 of the usual ones. float32 has no fast products, and gains nothing by more than few."""
    return 16 if itemsize > 2 else LARGE if d <= 128 else 64


@triton.jit
def _logits(q, k, factor, cap, SOFTCAP: tl.constexpr):
    """Logits that `_join` is to multiply by its `unit`. factor: the scale times log2(e), which is the unit then; with a soft cap the scale divided
    by the cap, whose log2(e) fold is `cap`, and the unit is 1."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        s = (2.0 * tl.sigmoid(2.0 * factor * s) - 1.0) * cap  # tanh
    return s


@triton.jit
def _join(s, v, biggest, total, acc, unit):
    """More keys into the running softmax of every row, in base 2 and logits of this unit; -inf marks what is not seen."""
    new = tl.maximum(biggest, tl.max(s, 1))
    base = tl.where(new == -float("inf"), 0.0, new) * unit
    weights = tl.exp2(s * unit - base[:, None])
    fade = tl.exp2(biggest * unit - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def _block(
    q, keys, values, positions, begin, stop, own, factor, cap, unit, reach, biggest, total, acc,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Entries [begin, begin + BN) of a chunk that ends at `stop`; WHOLE: all of them are before that."""
    lines = begin + tl.arange(0, BN)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    inside = lines < stop
    k_place = keys + lines[:, None].to(tl.int64) * D + width[None, :]
    v_place = values + lines[:, None].to(tl.int64) * DV + value_width[None, :]
    k_mask, v_mask = inside[:, None] & (width < D)[None, :], inside[:, None] & (value_width < DV)[None, :]
    k = tl.load(k_place) if WHOLE and BD == D else tl.load(k_place, mask=k_mask, other=0.0)
    s = _logits(q, k, factor, cap, SOFTCAP)
    if REACH:
        near = own[:, None] - tl.load(positions + lines, mask=inside, other=0)[None, :] < reach
        s = tl.where(near, s, -float("inf"))
    if not WHOLE:
        s = tl.where(inside[None, :], s, -float("inf"))
    v = tl.load(v_place) if WHOLE and BDV == DV else tl.load(v_place, mask=v_mask, other=0.0)
    return _join(s, v, biggest, total, acc, unit)


@triton.jit
def _over_prefix(
    Q, TABLE, CHUNKS, TILES, ORDER, LENGTHS, STARTS, OUT, SUMS, factor, cap, reach, q_row, q_head, table_prefix, chunks_prefix, rows,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, REACH: tl.constexpr, STAGES: tl.constexpr, PEEL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
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
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    q_mask = real[:, None] & (width < D)[None, :]
    q = tl.load(
        Q + row[:, None] * q_row + (head * GROUP + member)[:, None] * q_head + width[None, :], mask=q_mask, other=0.0
    )
    own, positions = line, ORDER
    if REACH:
        positions = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
        own = tl.load(STARTS + row, mask=real, other=0) + tl.load(LENGTHS + row, mask=real, other=0)

    unit = 1.0 if SOFTCAP else factor
    biggest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    whole = stop
    if PEEL:  # what is masked stands apart: products take the time, and masks add to it
        whole = start + (stop - start) // BN * BN
    for begin in tl.range(start, whole, BN, num_stages=STAGES):
        biggest, total, acc = _block(
            q, keys, values, positions, begin, stop, own, factor, cap, unit, reach, biggest, total, acc, D, DV, BD, BDV, BN, SOFTCAP, REACH, PEEL
        )  # fmt: skip
    if PEEL and whole < stop:
        biggest, total, acc = _block(
            q, keys, values, positions, whole, stop, own, factor, cap, unit, reach, biggest, total, acc, D, DV, BD, BDV, BN, SOFTCAP, REACH, False
        )  # fmt: skip

    target = (chunk.to(tl.int64) * rows + row) * GROUP + member
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(OUT + target[:, None] * DV + value_width[None, :], out, mask=real[:, None] & (value_width < DV)[None, :])
    tl.store(
        SUMS + target, tl.where(some, biggest * unit + tl.log2(tl.where(some, total, 1.0)), -float("inf")), mask=real
    )


@triton.jit
def _over_tails(
    Q, KEYS, VALUES, SLOTS, LENGTHS, OUT, SUMS, factor, cap, reach, q_row, q_head, k_row, k_head, v_row, v_head, rows, heads,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, REACH: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(LENGTHS + row) + 1  # its own token is there already
    begin = 0
    if REACH:
        begin = tl.maximum(length - reach, 0)
    each = tl.cdiv(tl.cdiv(length - begin, SPLITS), BN) * BN
    start = begin + split * each
    stop = tl.minimum(start + each, length)
    slot = tl.load(SLOTS + row).to(tl.int64)
    keys = KEYS + slot * k_row + head * k_head
    values = VALUES + slot * v_row + head * v_head

    line = tl.arange(0, BM)
    real = line < GROUP
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    q_place = row.to(tl.int64) * q_row + (head * GROUP + line)[:, None] * q_head + width[None, :]
    q = tl.load(Q + q_place, mask=real[:, None] & (width < D)[None, :], other=0.0)
    unit = 1.0 if SOFTCAP else factor
    biggest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    for at in tl.range(start, stop, BN, num_stages=STAGES):
        lines = at + tl.arange(0, BN)
        inside = lines < stop
        k_mask = inside[:, None] & (width < D)[None, :] if BD != D else inside[:, None]
        k = tl.load(keys + lines[:, None].to(tl.int64) * D + width[None, :], mask=k_mask, other=0.0)
        s = tl.where(inside[None, :], _logits(q, k, factor, cap, SOFTCAP), -float("inf"))
        v_mask = inside[:, None] & (value_width < DV)[None, :] if BDV != DV else inside[:, None]
        v = tl.load(values + lines[:, None].to(tl.int64) * DV + value_width[None, :], mask=v_mask, other=0.0)
        biggest, total, acc = _join(s, v, biggest, total, acc, unit)

    target = (split * rows + row).to(tl.int64) * heads + head * GROUP + line
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(OUT + target[:, None] * DV + value_width[None, :], out, mask=real[:, None] & (value_width < DV)[None, :])
    tl.store(
        SUMS + target, tl.where(some, biggest * unit + tl.log2(tl.where(some, total, 1.0)), -float("inf")), mask=real
    )
    if EARLY:  # noqa: SIM102  # known when it is compiled
        if row + head + split == 0:  # one program that waits, and this kernel is not done before the prefix is
            gdc_wait()


@triton.jit
def _merge(
    FAR, FAR_SUMS, NEAR, NEAR_SUMS, WHOSE, HEADS, OUT, heads_prefix, rows, heads, o_row, o_head,
    GROUP: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    place = HEADS + tl.load(WHOSE + row).to(tl.int64) * heads_prefix + head // GROUP
    first, last = tl.load(place), tl.load(place + 1)
    value_width = tl.arange(0, BDV)
    dense = (value_width < DV)[None, :]
    if EARLY:
        gdc_wait()

    splits = tl.arange(0, BS)
    near_place = (splits.to(tl.int64) * rows + row) * heads + head
    near_sums = tl.load(NEAR_SUMS + near_place, mask=splits < SPLITS, other=-float("inf"))
    near_mask = (splits < SPLITS)[:, None] & dense
    near = tl.load(NEAR + near_place[:, None] * DV + value_width[None, :], mask=near_mask, other=0.0).to(tl.float32)
    biggest = tl.max(near_sums, 0)  # finite: a row's newest token is there
    near_weights = tl.exp2(near_sums - biggest)
    total = tl.sum(near_weights, 0)
    acc = tl.sum(near_weights[:, None] * near, 0)
    for begin in range(first, last, BC):
        chunks = begin + tl.arange(0, BC)
        far_place = (chunks.to(tl.int64) * rows + row) * GROUP + head % GROUP
        far_sums = tl.load(FAR_SUMS + far_place, mask=chunks < last, other=-float("inf"))
        far_mask = (chunks < last)[:, None] & dense
        far = tl.load(FAR + far_place[:, None] * DV + value_width[None, :], mask=far_mask, other=0.0).to(tl.float32)
        new = tl.maximum(biggest, tl.max(far_sums, 0))
        fade = tl.exp2(biggest - new)
        far_weights = tl.exp2(far_sums - new)
        total = total * fade + tl.sum(far_weights, 0)
        acc = acc * fade + tl.sum(far_weights[:, None] * far, 0)
        biggest = new
    out = (acc / total).to(OUT.dtype.element_ty)
    tl.store(OUT + row.to(tl.int64) * o_row + head * o_head + value_width, out, mask=value_width < DV)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    starts: Tensor,
    table: Tensor,
    chunks: Tensor,
    heads_of: Tensor,
    tiles: Tensor,
    order: Tensor,
    whose: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    *,
    scale: float,
    softcap: float | None,
    reach: int | None,
    tile: int,
    per_head: int,
    far_blocks: Blocks | None = None,
    near_blocks: Blocks = TAILS,
    early: bool = False,
    side: torch.cuda.Stream | None = None,
) -> Tensor:
    """out [rows, heads, d_v] of one layer for q [rows, heads, d]; keys, values [slots, kv_heads, capacity, d] have every row's newest token.

    slots, lengths int32 [rows]: a row's tail, and its tokens before that one; several rows may be tokens of one tail, each of which sees
    those before it. starts int32 [rows]: the position of its first. table int64 [prefixes, 3]: addresses of
    keys, values and positions. chunks int32 [prefixes, C, 3]: KV head and entries from, to of every chunk, empty ones at the end; heads_of int32
    [prefixes, kv_heads + 1]: the chunks of each head. tiles int32 [T, 3]: prefix, and which of `order` int32 [rows] from, how many (0: none),
    at most `tile` queries with their groups. whose int32 [rows]: each row's prefix. scratch: outputs [C, rows, group, d_v], of any float
    type, and float32 sums [C, rows, group] of chunks, and those of tails [splits, rows, heads, d_v], [splits, rows, heads]; sums must start as -inf.
    per_head: the most chunks of a head. early: kernels begin before those before them are done (`begins_early`); else side: a stream on which
    tails are attended to while the prefix is.
    """
    rows, heads, d = q.shape
    kv_heads, d_v = values.shape[1], values.shape[-1]
    group = heads // kv_heads
    far, far_sums, near, near_sums = scratch
    splits = near.shape[0]
    size = d + d_v, q.itemsize, shared_memory(q.device)
    far_blocks = (far_blocks or (MANY if tile >= LARGE else FEW)).fitting(tile, *size)
    near_blocks = near_blocks.fitting(16, *size)
    limit = {} if far_blocks.registers is None or not q.is_cuda else {"maxnreg": far_blocks.registers}
    factor, cap = (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)
    flags = dict(GROUP=group, D=d, DV=d_v, BD=max(16, triton.next_power_of_2(d)), BDV=max(16, triton.next_power_of_2(d_v)),
                 SOFTCAP=softcap is not None, REACH=reach is not None, EARLY=early)  # fmt: skip
    follows = {"launch_pdl": True} if early else {}
    main = None if side is None else torch.cuda.current_stream(q.device)
    if side is not None and main is not None:
        side.wait_stream(main)
    # first, since its programs are large: those over tails fit between them
    _over_prefix[(chunks.shape[1], tiles.shape[0])](
        q, table, chunks, tiles, order, lengths, starts, far, far_sums, factor, cap, reach or 0, q.stride(0), q.stride(1),
        table.stride(0), chunks.stride(0), far.shape[1], **flags, BM=tile,
        BN=far_blocks.columns, STAGES=far_blocks.stages, PEEL=tile >= LARGE,
        num_warps=far_blocks.warps, **limit,
    )  # fmt: skip
    with nullcontext() if side is None else torch.cuda.stream(side):
        _over_tails[(rows, kv_heads, splits)](
            q, keys, values, slots, lengths, near, near_sums, factor, cap, reach or 0, q.stride(0), q.stride(1),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), near.shape[1], heads,
            **flags, BM=max(16, triton.next_power_of_2(group)), SPLITS=splits,
            BN=near_blocks.columns, STAGES=near_blocks.stages, num_warps=near_blocks.warps, **follows,
        )  # fmt: skip
    if side is not None and main is not None:
        main.wait_stream(side)
    at_once = min(64, max(8, triton.next_power_of_2(per_head)))
    _merge[(rows, heads)](
        far, far_sums, near, near_sums, whose, heads_of, out, heads_of.stride(0), far.shape[1], heads, out.stride(0), out.stride(1),
        GROUP=group, DV=d_v, BDV=flags["BDV"], BC=at_once, SPLITS=splits, BS=triton.next_power_of_2(splits), EARLY=early,
        num_warps=max(1, at_once // 16), **follows,
    )  # fmt: skip
    return out
