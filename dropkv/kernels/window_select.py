"""The kept entries of a layer from its scores, on the GPU, without a sort of all of them (Triton). Twin: `dropkv.budgets.select`, `keeper.take`.

Every entry has one 64-bit key, pooled score above unpooled score, both as integers of the same order, so a budget rule is a threshold. It is
found digit by digit: each of eight passes counts the entries under the digits so far by their next one. The rule of head-adaptive budgets
is such a search as well: at a threshold T it keeps sum over heads of max(floor, entries above T), which falls as T rises. Then what is above
the threshold is compacted (ties by position), sorted in tiles, merged by rank and copied out. Nothing is read back by the host.

Max pooling happens while scores are read; no pooled copy exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropkv.budgets import Kept, floor_of
from formats import LayerEntries

PASSES = 8
BLOCK = 4096  # scores of one program
SORTED = 512  # entries of a sorted tile
MINE = 64  # entries that a program ranks
EVERY = tl.constexpr(2147483647)
FORCED = tl.constexpr(2147483647)  # above the key of any number


@dataclass(frozen=True)
class Chosen:
    """Kept entries on the device: positions and admit int64 [entries] in file order, counts int64 and offsets int32 of the KV heads."""

    positions: Tensor
    admit: Tensor
    counts: Tensor
    offsets: Tensor

    def kept(self) -> Kept:
        """As the plain path gives them."""
        return Kept(self.positions, self.admit, self.counts)


def select_entries(
    scores: Tensor,
    count: int,
    *,
    forced: Sequence[int],
    rule: str,
    alpha: float,
    pooled: Tensor | None = None,
    pool: int = 1,
) -> Chosen | None:
    """The first `count` entries per KV head (on average) of scores float32 [kv_heads, n], in file order.

    pool: the scores rank by their largest of so many neighbours, then by themselves; pooled [kv_heads, n]: by these instead. rule: uniform, or
    head-adaptive with `alpha`. None where the plain path has to do it: every entry is kept, or the forced positions are not the first few and
    the last few.
    """
    heads, n = scores.shape
    always = {position for position in forced if position < n}
    count = max(1, len(always), min(count, n))
    ends = _ends(always, n)
    if ends is None or count >= n or rule not in ("uniform", "head-adaptive"):
        return None
    adaptive = rule == "head-adaptive"
    floor = int(floor_of(count, len(always), alpha)) if adaptive else count
    places, total, device = heads * (count - floor), heads * count, scores.device
    scores = scores.contiguous()
    ranked = scores if pooled is None else pooled.contiguous()
    blocks = triton.cdiv(n, BLOCK)
    tracks = 1 + adaptive
    histograms = torch.zeros((tracks, PASSES, heads, 256), dtype=torch.int32, device=device)
    state = torch.empty((tracks, PASSES, heads, 3), dtype=torch.int64, device=device)
    wide = int(triton.next_power_of_2(heads))
    reading = {"POOL": pool if pooled is None else 0, "BLOCK": BLOCK, "num_warps": 8}
    for number in range(PASSES):
        _count_digits[(blocks, heads)](
            scores, ranked, histograms, state, n, *ends, heads, floor, places, number, 56 - 8 * number,
            ADAPTIVE=adaptive, HP=wide, **reading,
        )  # fmt: skip
    counts = torch.empty(heads, dtype=torch.int64, device=device)
    offsets = torch.empty(heads + 1, dtype=torch.int32, device=device)
    limits = torch.empty((2, heads), dtype=torch.int64, device=device)
    _settle[(1,)](histograms, state, limits, counts, offsets, heads, floor, places, PASSES, ADAPTIVE=adaptive, HP=wide)
    above = torch.empty((2, heads, blocks), dtype=torch.int32, device=device)
    _count_above[(blocks, heads)](scores, ranked, limits, above, n, *ends, heads, **reading)
    keys = torch.empty((2, total), dtype=torch.int64, device=device)
    places_of = torch.empty((2, total), dtype=torch.int32, device=device)
    _compact[(blocks, heads)](
        scores, ranked, limits, above, offsets, keys[0], places_of[0], n, *ends, heads, **reading
    )  # fmt: skip
    tiles = triton.cdiv(total, SORTED) + heads
    _sort_tiles[(tiles,)](keys[0], places_of[0], keys[1], places_of[1], offsets, heads, SIZE=SORTED, WIDTH=64, HP=wide, num_warps=4)
    positions = torch.empty(total, dtype=torch.int64, device=device)
    admit = torch.empty(total, dtype=torch.int64, device=device)
    _merge_tiles[(tiles * (SORTED // MINE),)](
        keys[1], places_of[1], keys[0], positions, admit, offsets, heads, SIZE=SORTED, MINE=MINE, STEPS=SORTED.bit_length(), WIDTH=16,
        HP=wide, num_warps=4,
    )  # fmt: skip
    if adaptive:
        share = torch.full((1,), alpha, dtype=torch.float64, device=device)  # a number given to a kernel is a float32
        _admit[(triton.cdiv(total, MINE),)](
            keys[0], positions, admit, offsets, share, heads, total, count, len(always), count.bit_length(), n.bit_length(),
            MINE=MINE, HP=wide, num_warps=4,
        )  # fmt: skip
    return Chosen(positions, admit, counts, offsets)


def gather_entries(k: Tensor, v: Tensor, chosen: Chosen, scores: Tensor) -> LayerEntries:
    """The chosen entries of k [kv_heads, n, d_k] and v [kv_heads, n, d_v], whose last dimension is dense, with their scores."""
    heads, _, d = k.shape
    d_v, total = v.shape[-1], len(chosen.positions)
    scores = scores.contiguous()
    entries = LayerEntries(
        keys=k.new_empty((total, d)),
        values=v.new_empty((total, d_v)),
        offsets=chosen.offsets,
        positions=torch.empty(total, dtype=torch.int32, device=k.device),
        admit=torch.empty(total, dtype=torch.int32, device=k.device),
        scores=torch.empty(total, dtype=torch.float32, device=k.device),
    )
    rows = 16
    _gather[(triton.cdiv(total, rows),)](
        k, v, scores, chosen.positions, chosen.admit, chosen.offsets, entries.keys, entries.values, entries.positions, entries.admit,
        entries.scores, k.stride(0), k.stride(1), v.stride(0), v.stride(1), scores.shape[1], heads, total,
        ROWS=rows, D=d, DV=d_v, BD=triton.next_power_of_2(d), BDV=triton.next_power_of_2(d_v), HP=triton.next_power_of_2(heads),
        num_warps=4,
    )  # fmt: skip
    return entries


def _ends(always: set[int], n: int) -> tuple[int, int] | None:
    """How many first positions are forced, and from where on the last ones are; None for any others."""
    first = next(position for position in range(n + 1) if position not in always)
    last = next(position for position in range(n, -1, -1) if position - 1 not in always)
    return (first, last) if first + n - last == len(always) or first == n else None


@triton.jit
def _integer(x):
    """An int32 of the same order as a float32; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 2147483647, bits)


@triton.jit
def _key_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL: tl.constexpr):
    """The key of each of a head's entries: pooled score, then unpooled score; forced ones above all others, the newest first."""
    inside = lines < n
    row = head.to(tl.int64) * n
    raw = tl.load(SCORES + row + lines, mask=inside, other=-float("inf"))
    if POOL == 0:
        pooled = tl.load(RANKED + row + lines, mask=inside, other=-float("inf"))
    else:
        pooled = raw
        for step in tl.static_range(1, POOL // 2 + 1):
            pooled = tl.maximum(pooled, tl.load(SCORES + row + lines - step, mask=inside & (lines >= step), other=-float("inf")))
            pooled = tl.maximum(pooled, tl.load(SCORES + row + lines + step, mask=lines + step < n, other=-float("inf")))
    forced = (lines < forced_first) | (lines >= forced_from)
    high = tl.where(forced, FORCED, _integer(pooled)).to(tl.int64)
    low = tl.where(forced, lines.to(tl.int64), _integer(raw).to(tl.int64) + 2147483648)
    return (high << 32) + low


@triton.jit
def _deeper(prefix, above, done, digit, own, beyond, exactly, number):
    """The state of a search after one more digit; once nothing below is needed, `above` counts all that is taken and the rest is zeros."""
    ends = (done == 0) & exactly
    longer = tl.where(number > 1, prefix * 256 + tl.where(done == 1, 0, digit), digit - 128)
    above = tl.where(done == 1, above, tl.where(ends, beyond + own, beyond))
    return longer, above, tl.where(ends, 1, done).to(tl.int64), tl.where((done == 1) | ends, 0, own)


@triton.jit
def _digit(HISTOGRAMS, STATE, head, number, heads, wanted):
    """The search of one head after pass `number` - 1: (prefix, entries above it, whether nothing below is needed, entries at it)."""
    place = STATE + ((number - 1) * heads + head) * 3
    prefix, above, done = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    bins = tl.arange(0, 256)
    counts = tl.load(HISTOGRAMS + ((number - 1) * heads + head) * 256 + bins).to(tl.int64)
    up_to = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts + above  # entries at or above each digit
    digit = tl.max(tl.where(up_to >= wanted, bins, 0), 0)
    own = tl.sum(tl.where(bins == digit, counts, 0), 0)
    beyond = tl.sum(tl.where(bins > digit, counts, 0), 0) + above
    return _deeper(prefix, above, done, digit, own, beyond, beyond + own == wanted, number)


@triton.jit
def _layer_digit(HISTOGRAMS, STATE, number, heads, floor, places, HP: tl.constexpr):
    """The same for the layer as a whole: above and at are [HP], for every head."""
    head = tl.arange(0, HP)
    real = head < heads
    above = tl.load(STATE + ((number - 1) * heads + head) * 3 + 1, mask=real, other=0)
    prefix = tl.load(STATE + (number - 1) * heads * 3)
    done = tl.load(STATE + (number - 1) * heads * 3 + 2)
    bins = tl.arange(0, 256)
    where = ((number - 1) * heads + head)[:, None] * 256 + bins[None, :]
    counts = tl.load(HISTOGRAMS + where, mask=real[:, None], other=0).to(tl.int64)
    up_to = tl.sum(counts, 1)[:, None] - tl.cumsum(counts, 1) + counts + above[:, None]
    taken = tl.sum(tl.where(real[:, None], tl.maximum(up_to - floor, 0), 0), 0)  # places that each digit would fill
    digit = tl.max(tl.where(taken >= places, bins, 0), 0)
    own = tl.sum(tl.where(bins[None, :] == digit, counts, 0), 1)
    beyond = tl.sum(tl.where(bins[None, :] > digit, counts, 0), 1) + above
    exactly = tl.sum(tl.where(bins == digit, taken, 0), 0) == places
    return _deeper(prefix, above, done, digit, own, beyond, exactly, number)


@triton.jit
def _add_digits(HISTOGRAMS, keys, lines, n, prefix, shift, number, head, heads):
    """Count the next digit of the entries whose digits so far are `prefix`."""
    under = lines < n
    if number > 0:
        under = under & ((keys >> (shift + 8)) == prefix)
    digit = ((keys >> shift) & 255).to(tl.int32)
    if number == 0:
        digit = digit ^ 128
    counts = tl.histogram(digit, 256, mask=under)
    bins = tl.arange(0, 256)
    tl.atomic_add(HISTOGRAMS + (number * heads + head) * 256 + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "forced_first", "forced_from", "floor", "places", "number", "shift"])
def _count_digits(
    SCORES, RANKED, HISTOGRAMS, STATE, n, forced_first, forced_from, heads, floor, places, number, shift,
    ADAPTIVE: tl.constexpr, HP: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass `number`. Every program works out the digit that the pass before it found; those of the first block leave it to the next pass."""
    block, head = tl.program_id(0), tl.program_id(1)
    prefix = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int64)
    done = tl.full((), 0, tl.int64)
    layer_prefix = tl.full((), 0, tl.int64)
    layer_above = tl.full((), 0, tl.int64)
    layer_done = tl.full((), 1, tl.int64)
    second = 8 * heads
    if ADAPTIVE:
        layer_done = tl.full((), 0, tl.int64)
    if number > 0:
        prefix, above, done, _own = _digit(HISTOGRAMS, STATE, head, number, heads, floor)
        if ADAPTIVE:
            layer_prefix, all_above, layer_done, _owns = _layer_digit(
                HISTOGRAMS + second * 256, STATE + second * 3, number, heads, floor, places, HP
            )
            layer_above = tl.sum(tl.where(tl.arange(0, HP) == head, all_above, 0), 0)
    if block == 0:
        place = STATE + (number * heads + head) * 3
        tl.store(place, prefix)
        tl.store(place + 1, above)
        tl.store(place + 2, done)
        if ADAPTIVE:
            tl.store(place + second * 3, layer_prefix)
            tl.store(place + second * 3 + 1, layer_above)
            tl.store(place + second * 3 + 2, layer_done)
    if (done == 0) | (layer_done == 0):
        lines = block * BLOCK + tl.arange(0, BLOCK)
        keys = _key_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
        if done == 0:
            _add_digits(HISTOGRAMS, keys, lines, n, prefix, shift, number, head, heads)
        if ADAPTIVE:
            if layer_done == 0:
                _add_digits(HISTOGRAMS + second * 256, keys, lines, n, layer_prefix, shift, number, head, heads)


@triton.jit(do_not_specialize=["floor", "places"])
def _settle(HISTOGRAMS, STATE, LIMITS, COUNTS, OFFSETS, heads, floor, places, passes, ADAPTIVE: tl.constexpr, HP: tl.constexpr):
    """Threshold, how many entries equal to it are kept, and how many entries in all, of every head; and where they begin."""
    head = tl.arange(0, HP)
    real = head < heads
    kept = tl.where(real, floor, 0).to(tl.int64)
    limit = tl.zeros([HP], tl.int64)
    equal = tl.zeros([HP], tl.int64)
    for one in range(0, heads):
        prefix, above, done, _own = _digit(HISTOGRAMS, STATE, one, passes, heads, floor)
        limit = tl.where(head == one, prefix, limit)
        equal = tl.where(head == one, tl.where(done == 1, EVERY, floor - above), equal)
    if ADAPTIVE:
        second = passes * heads
        prefix, above, done, own = _layer_digit(HISTOGRAMS + second * 256, STATE + second * 3, passes, heads, floor, places, HP)
        # Entries at the threshold that no floor takes fill the places that are left, those of lower heads first.
        usable = tl.where(real, tl.maximum(above + own - tl.maximum(above, floor), 0), 0)
        usable = tl.where(done == 1, 0, usable)
        left = places - tl.sum(tl.where(real, tl.maximum(above - floor, 0), 0), 0)
        ties = tl.minimum(tl.maximum(left - (tl.cumsum(usable, 0) - usable), 0), usable)
        kept = tl.where(real, tl.maximum(above, floor) + ties, 0)
        shared = kept > floor
        limit = tl.where(shared, prefix, limit)
        equal = tl.where(shared, tl.where(done == 1, EVERY, kept - above), equal)
    tl.store(LIMITS + head, limit, mask=real)
    tl.store(LIMITS + heads + head, equal, mask=real)
    tl.store(COUNTS + head, kept, mask=real)
    tl.store(OFFSETS + head, (tl.cumsum(kept, 0) - kept).to(tl.int32), mask=real)
    tl.store(OFFSETS + heads, tl.sum(kept, 0).to(tl.int32))


@triton.jit(do_not_specialize=["n", "forced_first", "forced_from"])
def _count_above(
    SCORES, RANKED, LIMITS, ABOVE, n, forced_first, forced_from, heads, POOL: tl.constexpr, BLOCK: tl.constexpr
):
    """Entries of a block above its head's threshold, and at it."""
    block, head = tl.program_id(0), tl.program_id(1)
    lines = block * BLOCK + tl.arange(0, BLOCK)
    keys = _key_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
    limit = tl.load(LIMITS + head)
    place = head * tl.num_programs(0) + block
    tl.store(ABOVE + place, tl.sum(((lines < n) & (keys > limit)).to(tl.int32), 0))
    tl.store(ABOVE + heads * tl.num_programs(0) + place, tl.sum(((lines < n) & (keys == limit)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["n", "forced_first", "forced_from"])
def _compact(
    SCORES, RANKED, LIMITS, ABOVE, OFFSETS, KEYS, PLACES, n, forced_first, forced_from, heads, POOL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The kept entries of a block, behind those of the blocks before it."""
    block, head = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0)
    more = tl.zeros([128], tl.int32)
    same = tl.zeros([128], tl.int32)
    for start in range(0, block, 128):
        line = start + tl.arange(0, 128)
        more += tl.load(ABOVE + head * blocks + line, mask=line < block, other=0)
        same += tl.load(ABOVE + (heads + head) * blocks + line, mask=line < block, other=0)
    limit, needed = tl.load(LIMITS + head), tl.load(LIMITS + heads + head)
    ties = tl.sum(same, 0).to(tl.int64)
    slot = tl.load(OFFSETS + head) + tl.sum(more, 0) + tl.minimum(ties, needed).to(tl.int32)
    lines = block * BLOCK + tl.arange(0, BLOCK)
    keys = _key_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
    equal = ((lines < n) & (keys == limit)).to(tl.int32)
    tie = ties + tl.cumsum(equal, 0) - equal
    keep = (lines < n) & ((keys > limit) | ((equal == 1) & (tie < needed)))
    taken = keep.to(tl.int32)
    slots = slot + tl.cumsum(taken, 0) - taken
    tl.store(KEYS + slots, keys, mask=keep)
    tl.store(PLACES + slots, lines, mask=keep)


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


@triton.jit
def _sort_tiles(KEYS, PLACES, SORTED_KEYS, SORTED_PLACES, OFFSETS, heads, SIZE: tl.constexpr, WIDTH: tl.constexpr, HP: tl.constexpr):
    """Each tile sorted by itself: an entry's place is the number of entries before it."""
    start, first, last = _tile_head(OFFSETS, tl.program_id(0), heads, SIZE, HP)
    if start < last:
        stop = tl.minimum(last, start + SIZE)
        line = start + tl.arange(0, SIZE)
        key = tl.load(KEYS + line, mask=line < stop, other=0)
        place = tl.load(PLACES + line, mask=line < stop, other=0)
        rank = tl.zeros([SIZE], tl.int32)
        for other in range(start, stop, WIDTH):
            others = other + tl.arange(0, WIDTH)
            their_key = tl.load(KEYS + others, mask=others < stop, other=0)
            their_place = tl.load(PLACES + others, mask=others < stop, other=0)
            same = their_key[None, :] == key[:, None]
            before = (their_key[None, :] > key[:, None]) | (same & (their_place[None, :] < place[:, None]))
            rank += tl.sum((before & (others < stop)[None, :]).to(tl.int32), 1)
        tl.store(SORTED_KEYS + start + rank, key, mask=line < stop)
        tl.store(SORTED_PLACES + start + rank, place, mask=line < stop)


@triton.jit
def _merge_tiles(
    KEYS, PLACES, OUT_KEYS, OUT_PLACES, ADMIT, OFFSETS, heads,
    SIZE: tl.constexpr, MINE: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """An entry's place in its head: its place in its tile, and the number of entries before it in every other one."""
    tile, part = tl.program_id(0) // (SIZE // MINE), tl.program_id(0) % (SIZE // MINE)
    start, first, last = _tile_head(OFFSETS, tile, heads, SIZE, HP)
    line = start + part * MINE + tl.arange(0, MINE)
    stop = tl.minimum(last, start + SIZE)
    if start + part * MINE < stop:
        key = tl.load(KEYS + line, mask=line < stop, other=0)
        place = tl.load(PLACES + line, mask=line < stop, other=0)
        rank = line - start
        for group in range(first, last, SIZE * WIDTH):
            begin = group + tl.arange(0, WIDTH) * SIZE
            length = tl.minimum(tl.maximum(last - begin, 0), SIZE)
            length = tl.where(begin == start, 0, length)
            found = tl.zeros([MINE, WIDTH], tl.int32)
            for level in tl.static_range(0, STEPS):
                probe = found + (SIZE >> level) - 1
                inside = probe < length[None, :]
                at = begin[None, :] + probe
                their_key = tl.load(KEYS + at, mask=inside, other=0)
                their_place = tl.load(PLACES + at, mask=inside, other=0)
                before = (their_key > key[:, None]) | ((their_key == key[:, None]) & (their_place < place[:, None]))
                found = tl.where(inside & before, probe + 1, found)
            rank += tl.sum(found, 1)
        tl.store(OUT_KEYS + first + rank, key, mask=line < stop)
        tl.store(OUT_PLACES + first + rank, place.to(tl.int64), mask=line < stop)
        tl.store(ADMIT + first + rank, (rank + 1).to(tl.int64), mask=line < stop)


@triton.jit(do_not_specialize=["total", "count", "forced", "count_bits", "bits"])
def _admit(
    KEYS, PLACES, ADMIT, OFFSETS, ALPHA, heads, total, count, forced, count_bits, bits, MINE: tl.constexpr, HP: tl.constexpr
):  # fmt: skip
    """The smallest count per head whose kept set holds each entry (dropkv.budgets.adaptive_admit)."""
    line = tl.program_id(0) * MINE + tl.arange(0, MINE)
    inside = line < total
    head = tl.arange(0, HP)
    begin = tl.load(OFFSETS + head, mask=head < heads, other=0)
    end = tl.load(OFFSETS + head + 1, mask=head < heads, other=0)
    own = tl.sum(((end[None, :] <= line[:, None]) & (head < heads)[None, :]).to(tl.int32), 1)
    in_head = line - tl.sum(tl.where(head[None, :] == own[:, None], begin[None, :], 0), 1)
    key = tl.load(KEYS + line, mask=inside, other=0)
    place = tl.load(PLACES + line, mask=inside, other=0)
    found = tl.zeros([MINE, HP], tl.int32)  # entries of every head that come before, in the order of the whole layer
    for level in range(0, bits):
        probe = found + (1 << (bits - 1 - level)) - 1
        at = begin[None, :] + probe
        real = (at < end[None, :]) & inside[:, None]
        their_key = tl.load(KEYS + at, mask=real, other=0)
        their_place = tl.load(PLACES + at, mask=real, other=0)
        earlier = (head[None, :] < own[:, None]) | ((head[None, :] == own[:, None]) & (their_place < place[:, None]))
        before = (their_key > key[:, None]) | ((their_key == key[:, None]) & earlier)
        found = tl.where(real & before, probe + 1, found)
    alpha = tl.load(ALPHA)
    low = tl.full([MINE], 1, tl.int32)
    high = tl.zeros([MINE], tl.int32) + count
    for _step in range(0, count_bits):
        middle = (low + high) // 2
        floor = tl.minimum((alpha * middle.to(tl.float64) + 1e-9).to(tl.int32), middle)
        floor = tl.maximum(floor, forced)
        ahead = tl.sum(tl.where((head < heads)[None, :], tl.maximum(found - floor[:, None], 0), 0), 1)
        holds = (in_head < floor) | (ahead.to(tl.int64) < heads.to(tl.int64) * (middle - floor))
        open_ = low < high
        high = tl.where(open_ & holds, middle, high)
        low = tl.where(open_ & (holds == 0), middle + 1, low)
    tl.store(ADMIT + line, high.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["n", "total"])
def _gather(
    K, V, SCORES, POSITIONS, ADMIT, OFFSETS, KEYS, VALUES, OUT_POSITIONS, OUT_ADMIT, OUT_SCORES, k_head, k_key, v_head, v_key, n, heads, total,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = line < total
    head = tl.arange(0, HP)
    end = tl.load(OFFSETS + head + 1, mask=head < heads, other=0)
    own = tl.sum(((end[None, :] <= line[:, None]) & (head < heads)[None, :]).to(tl.int32), 1).to(tl.int64)
    position = tl.load(POSITIONS + line, mask=inside, other=0)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    row = line.to(tl.int64)[:, None]
    mask = inside[:, None] & (width < D)[None, :]
    k = tl.load(K + (own * k_head + position * k_key)[:, None] + width[None, :], mask=mask, other=0.0)
    value_mask = inside[:, None] & (value_width < DV)[None, :]
    v = tl.load(V + (own * v_head + position * v_key)[:, None] + value_width[None, :], mask=value_mask, other=0.0)
    tl.store(KEYS + row * D + width[None, :], k, mask=mask)
    tl.store(VALUES + row * DV + value_width[None, :], v, mask=value_mask)
    tl.store(OUT_POSITIONS + line, position.to(tl.int32), mask=inside)
    tl.store(OUT_ADMIT + line, tl.load(ADMIT + line, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(OUT_SCORES + line, tl.load(SCORES + own * n + position, mask=inside, other=0.0), mask=inside)
