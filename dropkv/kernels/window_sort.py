"""The lists of entries that a selection leaves, sorted and cut (Triton): sorted in tiles, merged by rank (long lists in two steps, a few
tiles at first), and, where heads share a budget, given the smallest budget that keeps each. The plain-torch twin is in `dropkv.budgets`.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

SORTED = 256  # entries of a sorted tile
MINE = 64  # of them, those that one program ranks
MERGED = 8  # tiles that become one in the first of two steps
LOOKED_UP = 32  # entries of a head that one program finds the budgets of
EVERY = tl.constexpr(2147483647)
ALPHA_SHIFT = tl.constexpr(1 << 62)  # what makes any share's bits a 64-bit argument


def sort_and_cut(
    keys: Tensor, lines: Tensor, offsets: Tensor, counts: Tensor, *, kept: int, n: int, forced: int, alpha: float | None
) -> tuple[Tensor, Tensor]:
    """Positions and admit int64 [kv_heads * kept] in file order, of lists that hold all that is kept and perhaps more.

    keys int64 [2, spare], lines int32 [2, spare]: in the first rows the lists, head after head, unsorted, where offsets int32 [kv_heads + 1]
    says; the rest is overwritten. alpha: the share of head-adaptive budgets, None for uniform ones; with it counts int64 [kv_heads], zeros, is
    filled. n: keys of a head; forced: entries that every head keeps.
    """
    heads, spare, adaptive = len(counts), keys.shape[1], alpha is not None
    wide, device = int(triton.next_power_of_2(heads)), keys.device

    def pieces(size: int, part: int) -> tuple[int]:
        """Programs for parts of all runs of `size` entries, the last of every head being shorter."""
        return ((triton.cdiv(spare, size) + heads) * (size // part),)

    cut = {"MINE": MINE, "HP": wide, "num_warps": 4}
    _sort_tiles[pieces(SORTED, MINE)](keys, lines, offsets, heads, spare, SIZE=SORTED, WIDTH=min(32, SORTED), **cut)
    positions = torch.empty(heads * kept, dtype=torch.int64, device=device)
    admit = torch.empty(heads * kept, dtype=torch.int64, device=device)
    # In two steps an entry is looked up in fewer runs; where the heads' lists are short on average, one launch less is worth more.
    steps = [SORTED, SORTED * MERGED] if spare > heads * SORTED * MERGED else [SORTED]
    half = 1
    for size in steps:
        final = size == steps[-1]
        _merge_runs[pieces(size, MINE)](
            keys, lines, positions, admit, offsets, heads, spare, kept, half * spare, (1 - half) * spare, size.bit_length(),
            EMIT=final and not adaptive, WIDTH=4 if size > SORTED else MERGED, SIZE=size, ALL=final,
            maxnreg=72, **cut,
        )  # fmt: skip
        half = 1 - half
    if alpha is not None:
        bits = int.from_bytes(struct.pack(">d", alpha), "big")  # a number given to a kernel would be a float32
        _admit[pieces(LOOKED_UP, LOOKED_UP)](
            keys, lines, counts, offsets, bits + ALPHA_SHIFT.value, heads, spare, kept, forced, (kept + 1).bit_length(),
            (min(n, spare).bit_length() + 1) // 2, half * spare, (1 - half) * spare, MINE=LOOKED_UP, HP=wide, num_warps=1, maxnreg=128,
        )  # fmt: skip
        _emit[(triton.cdiv(spare, 256),)](
            lines,
            positions,
            admit,
            counts,
            offsets,
            heads,
            half * spare,
            (1 - half) * spare,
            MINE=256,
            HP=wide,
            num_warps=4,
        )
    return positions, admit


@triton.jit
def _tile_head(OFFSETS, tile, heads, SIZE: tl.constexpr, HP: tl.constexpr):
    """Which head a tile belongs to, where the tile begins and where its head does and ends; beyond the last tile: beginning = end."""
    head = tl.arange(0, HP)
    real = head < heads
    begin = tl.load(OFFSETS + head, mask=real, other=0)
    end = tl.load(OFFSETS + head + 1, mask=real, other=0)
    tiles = (end - begin + SIZE - 1) // SIZE
    up_to = tl.cumsum(tiles, 0)
    own = tl.sum(((up_to <= tile) & real).to(tl.int32), 0)
    before = tl.sum(tl.where(head < own, tiles, 0), 0)
    mine = head == own
    first, last = tl.sum(tl.where(mine, begin, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    return first + (tile - before) * SIZE * (own < heads).to(tl.int32), first, last


@triton.jit(do_not_specialize=["heads", "spare"])
def _sort_tiles(
    KEYS, LINES, OFFSETS, heads, spare, SIZE: tl.constexpr, MINE: tl.constexpr, WIDTH: tl.constexpr, HP: tl.constexpr
):
    """Each tile sorted by itself, behind the unsorted ones: an entry's place is the number of entries before it."""
    tile, part = tl.program_id(0) // (SIZE // MINE), tl.program_id(0) % (SIZE // MINE)
    start, _first, last = _tile_head(OFFSETS, tile, heads, SIZE, HP)
    stop = tl.minimum(last, start + SIZE)
    if start + part * MINE < stop:
        line = start + part * MINE + tl.arange(0, MINE)
        key = tl.load(KEYS + line, mask=line < stop, other=0)
        place = tl.load(LINES + line, mask=line < stop, other=0)
        ranks = tl.zeros([WIDTH, MINE], tl.int32)
        for other in range(start, stop, WIDTH):
            others = other + tl.arange(0, WIDTH)
            their_key = tl.load(KEYS + others, mask=others < stop, other=0)[:, None]
            their_place = tl.load(LINES + others, mask=others < stop, other=0)[:, None]
            before = (their_key > key[None, :]) | ((their_key == key[None, :]) & (their_place < place[None, :]))
            ranks += (before & (others < stop)[:, None]).to(tl.int32)
        rank = tl.sum(ranks, 0)
        tl.store(KEYS + spare + start + rank, key, mask=line < stop)
        tl.store(LINES + spare + start + rank, place, mask=line < stop)


@triton.jit
def _above(KEYS, begin, probe, length, newest, bound):
    """1 where the entry `probe` of a sorted list has a key above `bound`; none lies behind `newest`, so that no load needs a mask."""
    their_key = tl.load(KEYS + tl.minimum(begin + probe, newest))
    return ((probe < length) & (their_key > bound)).to(tl.int32)


@triton.jit
def _before(KEYS, LINES, begin, probe, length, key, place):
    """1 where the entry `probe` of a sorted list comes before mine: by key, then position."""
    inside = probe < length
    their_key = tl.load(KEYS + begin + probe, mask=inside, other=0)
    same = inside & (their_key == key)
    their_place = tl.load(LINES + begin + probe, mask=same, other=0)
    return (inside & ((their_key > key) | (same & (their_place < place)))).to(tl.int32)


@triton.jit(do_not_specialize=["heads", "spare", "count", "source", "target", "levels"])
def _merge_runs(
    KEYS, LINES, POSITIONS, ADMIT, OFFSETS, heads, spare, count, source, target, levels,
    EMIT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ALL: tl.constexpr, MINE: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """Sorted runs of SIZE entries, merged WIDTH at a time, or ALL of a head: an entry's place is its place in its run, and the number of
    entries before it in every other one. From the half of the lists at `source` to that at `target`, or, EMIT, the first `count` to the end."""
    tile, part = tl.program_id(0) // (SIZE // MINE), tl.program_id(0) % (SIZE // MINE)
    start, first, last = _tile_head(OFFSETS, tile, heads, SIZE, HP)
    stop = tl.minimum(last, start + SIZE)
    if start + part * MINE < stop:
        lower, upper = first, last
        if not ALL:
            lower = first + (start - first) // (SIZE * WIDTH) * (SIZE * WIDTH)
            upper = tl.minimum(last, lower + SIZE * WIDTH)
        line = start + part * MINE + tl.arange(0, MINE)
        key = tl.load(KEYS + source + line, mask=line < stop, other=0)
        place = tl.load(LINES + source + line, mask=line < stop, other=0)
        # Neighbours in a sorted run look at neighbouring places of other runs, and Triton gives neighbours of the first dimension to one warp.
        ranks = tl.zeros([MINE, WIDTH], tl.int32)
        for group in range(lower, upper, SIZE * WIDTH):
            begin = (group + tl.arange(0, WIDTH) * SIZE)[None, :]
            length = tl.where(begin == start, 0, tl.minimum(tl.maximum(upper - begin, 0), SIZE))
            found = tl.zeros([MINE, WIDTH], tl.int32)
            for level in range(0, levels):
                step = SIZE >> level
                found += step * _above(KEYS, source + begin, found + step - 1, length, source + upper - 1, key[:, None])
            # Equal keys are rare: whether there are any is seen behind what lies above.
            equal = tl.load(KEYS + source + begin + found, mask=found < length, other=-1) == key[:, None]
            if tl.max(tl.max((equal & (found < length)).to(tl.int32), 1), 0) > 0:
                found = tl.zeros([MINE, WIDTH], tl.int32)
                for level in range(0, levels):
                    step = SIZE >> level
                    probe = found + step - 1
                    found += step * _before(KEYS, LINES, source + begin, probe, length, key[:, None], place[:, None])
            ranks += found
        rank = line - start + tl.sum(ranks, 1)
        if EMIT:
            ends = tl.load(OFFSETS + tl.arange(0, HP) + 1, mask=tl.arange(0, HP) < heads, other=EVERY)
            to = tl.sum((ends <= first).to(tl.int32), 0) * count + rank
            tl.store(POSITIONS + to, place.to(tl.int64), mask=(line < stop) & (rank < count))
            tl.store(ADMIT + to, (rank + 1).to(tl.int64), mask=(line < stop) & (rank < count))
        else:
            tl.store(KEYS + target + lower + rank, key, mask=line < stop)
            tl.store(LINES + target + lower + rank, place, mask=line < stop)


@triton.jit(
    do_not_specialize=["alpha_bits", "heads", "spare", "count", "forced", "count_bits", "levels", "source", "target"]
)
def _admit(
    KEYS, LINES, COUNTS, OFFSETS, alpha_bits, heads, spare, count, forced, count_bits, levels, source, target,
    MINE: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """The smallest count per head whose kept set holds each entry (dropkv.budgets.adaptive_admit), count + 1 for those that are not kept,
    beside the sorted lines; and how many are kept of each head.

    What comes before an entry in another head lies between what does so for the first and the last entry of its program, which are looked up
    in whole lists; all others between the two.
    """
    start, first, last = _tile_head(OFFSETS, tl.program_id(0), heads, MINE, HP)
    stop = tl.minimum(last, start + MINE)
    if start < stop:
        head = tl.arange(0, HP)
        real = head < heads
        begin = tl.load(OFFSETS + head, mask=real, other=0)[None, :]
        end = tl.load(OFFSETS + head + 1, mask=real, other=0)[None, :]
        own = tl.sum(((end <= start) & real[None, :]).to(tl.int32))
        lower = (head < own)[None, :].to(
            tl.int64
        )  # an equal key of a lower head comes before mine, one of a higher head does not
        begins, newest = source + begin, source + tl.load(OFFSETS + heads) - 1

        edge = tl.where(tl.arange(0, 2) == 0, start, stop - 1)
        bound = tl.load(KEYS + source + edge)[:, None] - lower
        length = tl.zeros([2, HP], tl.int32) + (end - begin)
        found = tl.zeros([2, HP], tl.int32)
        for level in range(0, levels):  # three probes at a time: what takes time here is waiting for them
            step = 1 << (2 * (levels - 1 - level))
            more = tl.zeros([2, HP], tl.int32)
            for quarter in tl.static_range(1, 4):
                more += _above(KEYS, begins, found + quarter * step - 1, length, newest, bound)
            found += more * step
        found += _above(KEYS, begins, found, length, newest, bound)
        least, most = tl.min(found, 0)[None, :], tl.max(found, 0)[None, :]

        line = start + tl.arange(0, MINE)
        inside = line < stop
        bound = tl.load(KEYS + source + line, mask=inside, other=0)[:, None] - lower
        found = tl.zeros([MINE, HP], tl.int32) + least  # entries of every head that come before
        step = 1
        while step <= tl.max(most - least):
            step *= 2
        while step > 1:
            step = step // 2
            found += step * _above(KEYS, begins, found + step - 1, most, newest, bound)
        found = tl.where(head[None, :] == own, (line - first)[:, None], found)

        alpha = (alpha_bits - ALPHA_SHIFT).to(tl.float64, bitcast=True)
        low = tl.full([MINE], 1, tl.int32)
        high = tl.zeros([MINE], tl.int32) + count + 1
        for _step in range(0, count_bits):
            middle = (low + high) >> 1
            floor = tl.minimum((alpha * middle.to(tl.float64) + 1e-9).to(tl.int32), middle)
            floor = tl.maximum(floor, forced)
            ahead = tl.sum(tl.maximum(found - floor[:, None], 0), 1)
            holds = (line - first < floor) | (ahead < (middle - floor) * heads)
            open_ = low < high
            high = tl.where(open_ & holds, middle, high)
            low = tl.where(open_ & (holds == 0), middle + 1, low)
        tl.store(LINES + target + line, high, mask=inside)
        tl.atomic_add(COUNTS + own, tl.sum((inside & (high <= count)).to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["heads", "source", "target"])
def _emit(LINES, POSITIONS, ADMIT, COUNTS, OFFSETS, heads, source, target, MINE: tl.constexpr, HP: tl.constexpr):
    """The kept entries of all heads end to end: the first of each sorted list."""
    line = tl.program_id(0) * MINE + tl.arange(0, MINE)
    head = tl.arange(0, HP)
    real = head < heads
    begin = tl.load(OFFSETS + head, mask=real, other=0)
    end = tl.load(OFFSETS + head + 1, mask=real, other=0)
    counts = tl.load(COUNTS + head, mask=real, other=0).to(tl.int32)
    own = tl.sum(((end[:, None] <= line[None, :]) & real[:, None]).to(tl.int32), 0)
    mine = head[:, None] == own[None, :]
    rank = line - tl.sum(tl.where(mine, begin[:, None], 0), 0)
    to = rank + tl.sum(tl.where(mine, (tl.cumsum(counts, 0) - counts)[:, None], 0), 0)
    kept = (line < tl.load(OFFSETS + heads)) & (rank < tl.sum(tl.where(mine, counts[:, None], 0), 0))
    tl.store(POSITIONS + to, tl.load(LINES + source + line, mask=kept, other=0).to(tl.int64), mask=kept)
    tl.store(ADMIT + to, tl.load(LINES + target + line, mask=kept, other=0).to(tl.int64), mask=kept)
