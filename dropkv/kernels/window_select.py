"""The kept entries of a layer from its scores, on the GPU, without a sort of all of them (Triton). Twin: `dropkv.budgets.select`.

Every entry has one 64-bit key, pooled score above unpooled score, both as integers of the same order. The threshold of a budget rule is
searched digit by digit: each pass counts the entries under the digits so far by their next one. Head-adaptive budgets are such a search as
well: at a threshold T they keep sum over heads of max(floor, entries above T), which falls as T rises. As soon as what lies at or above the
digits so far fits into memory with a little to spare, usually after two passes, it is compacted, sorted in tiles and merged by rank; the
exact cut is made in the sorted lists. Where ties are so many that they never fit, all eight digits are found, and ties taken by position.
The passes are one launch, whose programs hold the upper halves of their keys and wait for one another; nothing is read back by the host. The
lower halves are made where they are needed: of what is compacted, and in the rare passes over them.

Max pooling happens while scores are read; no pooled copy exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropkv.budgets import Kept, floor_of
from dropkv.kernels.window_sort import sort_and_cut

PASSES = tl.constexpr(8)
PHASES = 10  # the passes, then counting and compaction where ties are too many
# Counters before the histograms: one a phase, for programs to meet at, and last the phase that compacted.
HEADER = tl.constexpr(64)
SMALL = 1024  # scores of a tile where the lower halves of keys are needed
SPARE = 4096  # entries beside an eighth of the kept ones that may be sorted for nothing
EVERY = tl.constexpr(2147483647)
FORCED = tl.constexpr(2147483647)  # above the key of any number


def select_entries(
    scores: Tensor,
    count: int,
    *,
    forced: Sequence[int],
    rule: str,
    alpha: float,
    pooled: Tensor | None = None,
    pool: int = 1,
) -> Kept | None:
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
    if heads * n > EVERY.value:
        return None
    scores = scores.contiguous()
    ranked = scores if pooled is None else pooled.contiguous()
    block, programs, together = _grid(scores)
    small = min(block, SMALL)
    wide, bins = int(triton.next_power_of_2(heads)), (1 + adaptive) * 8 * heads
    spare = min(heads * n, total + total // 8 + SPARE)
    counters = torch.zeros(HEADER.value + bins * 256 + heads, dtype=torch.int32, device=device)
    state = torch.empty((bins + heads) * 3, dtype=torch.int64, device=device)
    above = torch.empty((2, heads, triton.cdiv(n, small)), dtype=torch.int32, device=device)
    counts = torch.empty(heads, dtype=torch.int64, device=device)
    offsets = torch.empty(heads + 1, dtype=torch.int32, device=device)
    keys = torch.empty((2, spare), dtype=torch.int64, device=device)
    lines = torch.empty((2, spare), dtype=torch.int32, device=device)
    for first in range(0, 1 if together else PHASES):
        _choose[(programs, heads)](
            scores, ranked, counters, state, above, counts, offsets, keys, lines, n, *ends, heads, floor, places, spare, first,
            PHASES if together else first + 1, ADAPTIVE=adaptive, HP=wide, POOL=pool if pooled is None else 0, BLOCK=block,
            SMALL=small, ONE=programs >= triton.cdiv(n, block), TOGETHER=together, num_warps=max(4, min(16, block // 512)),
            **({"launch_cooperative_grid": True} if together else {}),
        )  # fmt: skip
    positions, admit = sort_and_cut(
        keys, lines, offsets, counts, kept=count, n=n, forced=len(always), alpha=alpha if adaptive else None
    )
    return Kept(positions, admit, counts)


def _grid(scores: Tensor) -> tuple[int, int, bool]:
    """Scores of a tile, programs of a head, and whether the programs of all heads run at once and so can wait for one another."""
    heads, n = scores.shape
    if not scores.is_cuda:
        return 256, triton.cdiv(n, 512), False  # the interpreter runs one program after the other
    processors = torch.cuda.get_device_properties(scores.device).multi_processor_count
    if heads > processors:
        return 4096, triton.cdiv(n, 4096), False
    programs = processors // heads
    block = min(8192, max(1024, int(triton.next_power_of_2(triton.cdiv(n, programs)))))
    return block, min(programs, triton.cdiv(n, block)), True


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
def _high_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL: tl.constexpr):
    """The upper half of the key of each of a head's entries: its pooled score; forced ones above all others."""
    inside = lines < n
    row = head.to(tl.int64) * n
    if POOL == 0:
        pooled = tl.load(RANKED + row + lines, mask=inside, other=-float("inf"))
    else:
        pooled = tl.load(SCORES + row + lines, mask=inside, other=-float("inf"))
        for step in tl.static_range(1, POOL // 2 + 1):
            before = tl.load(SCORES + row + lines - step, mask=inside & (lines >= step), other=-float("inf"))
            behind = tl.load(SCORES + row + lines + step, mask=lines + step < n, other=-float("inf"))
            pooled = tl.maximum(pooled, tl.maximum(before, behind))
    return tl.where((lines < forced_first) | (lines >= forced_from), FORCED, _integer(pooled))


@triton.jit
def _key_of(SCORES, high, head, lines, wanted, n, forced_first, forced_from):
    """The keys of wanted entries: their upper half, then the unpooled score; of forced ones the newest first."""
    raw = tl.load(SCORES + head.to(tl.int64) * n + lines, mask=wanted, other=-float("inf"))
    forced = (lines < forced_first) | (lines >= forced_from)
    low = tl.where(forced, lines.to(tl.int64), _integer(raw).to(tl.int64) + 2147483648)
    return (high.to(tl.int64) << 32) + low


@triton.jit
def _deeper(prefix, above, done, digit, own, up_to, exactly, number):
    """The state of a search after one more digit; once nothing below is needed, `above` counts all that is taken and the rest is zeros."""
    ends = (done == 0) & exactly
    longer = tl.where(number > 1, prefix * 256 + tl.where(done == 1, 0, digit), (digit - 128).to(tl.int64))
    above = tl.where(done == 1, above, tl.where(ends, up_to, up_to - own))
    return longer, above, tl.where(ends, 1, done), tl.where((done == 1) | ends, 0, own)


@triton.jit
def _all_digits(HISTOGRAMS, STATE, number, heads, floor, places, LAYER: tl.constexpr, HP: tl.constexpr):
    """The searches of all heads [HP], or the layer's one search: (prefix, entries above it, whether nothing below is needed, entries at it).

    The layer's states and histograms stand behind the heads' own ones; where a head's own search is at the layer's digits, one count serves both.
    """
    head = tl.arange(0, HP)
    real = head < heads
    place = (number - 1) * heads + head
    second = 8 * heads if LAYER else 0
    prefix = tl.load(STATE + (second + place) * 3, mask=real, other=0)
    above = tl.load(STATE + (second + place) * 3 + 1, mask=real, other=0).to(tl.int32)
    done = tl.load(STATE + (second + place) * 3 + 2, mask=real, other=0).to(tl.int32)
    row = place
    if LAYER:
        own_prefix = tl.load(STATE + place * 3, mask=real, other=0)
        own_done = tl.load(STATE + place * 3 + 2, mask=real, other=0)
        row = tl.where((own_prefix == prefix) & (own_done == 0), place, second + place)
    bins = tl.arange(0, 256)
    counts = tl.load(HISTOGRAMS + row[:, None] * 256 + bins[None, :], mask=real[:, None], other=0)
    up_to = tl.cumsum(counts, 1, reverse=True) + above[:, None]
    if LAYER:
        taken = tl.sum(tl.where(real[:, None], tl.maximum(up_to - floor, 0), 0), 0)  # places that each digit would fill
        digit = tl.maximum(tl.sum((taken >= places).to(tl.int32), 0) - 1, 0)
        mine = (bins == digit)[None, :]
    else:
        digit = tl.maximum(tl.sum((up_to >= floor).to(tl.int32), 1) - 1, 0)
        mine = bins[None, :] == digit[:, None]
    both = tl.sum(tl.where(mine, up_to.to(tl.int64) * 4294967296 + counts, 0), 1)
    own, up_to = (both & 4294967295).to(tl.int32), (both >> 32).to(tl.int32)
    exactly = up_to == floor
    if LAYER:
        exactly = (tl.sum(tl.where(real, tl.maximum(up_to - floor, 0), 0), 0) == places) & real
    return _deeper(prefix, above, done, digit, own, up_to, exactly, number)


@triton.jit
def _add_digits(HISTOGRAMS, keys, inside, prefix, shift, number, place):
    """Count the next digit of the entries whose digits so far are `prefix`; keys: of 64 bits, or their upper halves, shift: where the digit is."""
    under = inside & ((number == 0) | ((keys >> tl.where(number == 0, shift, shift + 8)) == prefix))
    digit = ((keys >> shift) & 255).to(tl.int32)
    digit = tl.where(number == 0, digit ^ 128, digit)  # the first one has the sign
    counts = tl.histogram(digit, 256, mask=under)
    bins = tl.arange(0, 256)
    tl.atomic_add(HISTOGRAMS + place * 256 + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _append(KEYS, LINES, CURSOR, begin, keys, lines, keep):
    """Entries to keep, in any order, to the end of their head's list."""
    taken = keep.to(tl.int32)
    slot = begin + tl.atomic_add(CURSOR, tl.sum(taken, 0), sem="relaxed")
    slots = slot + tl.cumsum(taken, 0) - taken
    tl.store(KEYS + slots, keys, mask=keep)
    tl.store(LINES + slots, lines, mask=keep)


@triton.jit
def _settled(
    limit,
    above,
    done,
    layer_limit,
    layer_above,
    layer_done,
    layer_own,
    heads,
    floor,
    places,
    ADAPTIVE: tl.constexpr,
    HP: tl.constexpr,
):
    """Of every head [HP], after all digits: threshold, how many entries equal to it are kept, how many entries in all."""
    real = tl.arange(0, HP) < heads
    equal = tl.where(done == 1, EVERY, floor - above)
    kept = tl.where(real, floor, 0)
    if ADAPTIVE:
        # Entries at the threshold that no floor takes fill the places that are left, those of lower heads first.
        taken = tl.maximum(layer_above, floor)
        usable = tl.where(real & (layer_done == 0), tl.maximum(layer_above + layer_own - taken, 0), 0)
        left = places - tl.sum(tl.where(real, taken - floor, 0), 0)
        ties = tl.minimum(tl.maximum(left - (tl.cumsum(usable, 0) - usable), 0), usable)
        kept = tl.where(real, taken + ties, 0)
        shared = kept > floor
        limit = tl.where(shared, layer_limit, limit)
        equal = tl.where(shared, tl.where(layer_done == 1, EVERY, kept - layer_above), equal)
    return limit, equal, kept


@triton.jit
def _meet(COUNTER, programs):
    """Wait for every program of the grid; all of them run at once."""
    tl.debug_barrier()
    arrived = tl.atomic_add(COUNTER, 1, sem="acq_rel") + 1
    while arrived < programs:
        arrived = tl.atomic_add(COUNTER, 0, sem="acq_rel")
    tl.debug_barrier()


@triton.jit
def _store_state(STATE, number, heads, prefix, above, done, HP: tl.constexpr):
    head = tl.arange(0, HP)
    place = STATE + (number * heads + head) * 3
    tl.store(place, prefix, mask=head < heads)
    tl.store(place + 1, above.to(tl.int64), mask=head < heads)
    tl.store(place + 2, done.to(tl.int64), mask=head < heads)


@triton.jit
def _of(values, head, HP: tl.constexpr):
    """One head's of [HP]."""
    return tl.sum(tl.where(tl.arange(0, HP) == head, values, 0), 0)


@triton.jit
def _store_counts(COUNTS, OFFSETS, heads, floor, sizes, ADAPTIVE: tl.constexpr, HP: tl.constexpr):
    """Where each head's list begins, and how many of it are kept; with head-adaptive budgets that is counted later."""
    head = tl.arange(0, HP)
    tl.store(COUNTS + head, tl.zeros([HP], tl.int64) + (0 if ADAPTIVE else floor), mask=head < heads)
    tl.store(OFFSETS + head, tl.cumsum(sizes, 0) - sizes, mask=head < heads)
    tl.store(OFFSETS + heads, tl.sum(sizes, 0))


@triton.jit(
    do_not_specialize=["n", "forced_first", "forced_from", "heads", "floor", "places", "spare", "first", "last"]
)
def _choose(
    SCORES, RANKED, COUNTERS, STATE, ABOVE, COUNTS, OFFSETS, KEYS, LINES,
    n, forced_first, forced_from, heads, floor, places, spare, first, last,
    ADAPTIVE: tl.constexpr, HP: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, ONE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Phases `first` to `last` - 1. Every program works out the digits that the pass before it found; one of them leaves them to the next
    pass."""
    block, programs, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    writes = (block == 0) & (head == 0)
    tiles, small_tiles = (n + BLOCK - 1) // BLOCK, (n + SMALL - 1) // SMALL
    second = PASSES * heads
    HISTOGRAMS = COUNTERS + HEADER
    LAYER_HISTOGRAMS, LAYER_STATE = HISTOGRAMS + second * 256, STATE + second * 3
    rows = 2 * second if ADAPTIVE else second
    CURSORS, limits = HISTOGRAMS + rows * 256, STATE + rows * 3
    if ONE:
        mine = block * BLOCK + tl.arange(0, BLOCK)
        my_high = _high_of(SCORES, RANKED, head, mine, n, forced_first, forced_from, POOL)
    ended = tl.full((), 0, tl.int32)
    for phase in range(first, last):
        if not TOGETHER:  # the phase of an earlier launch that compacted, if one did
            compacted = tl.load(COUNTERS + HEADER - 1)
            ended = ((compacted > 0) & (compacted <= phase)).to(tl.int32)
        if ended == 0:
            if TOGETHER and phase > 0:
                _meet(COUNTERS + phase, programs * heads)
            prefix = tl.zeros([HP], tl.int64)
            above = tl.zeros([HP], tl.int32)
            done = tl.zeros([HP], tl.int32)
            own = tl.zeros([HP], tl.int32)
            layer_prefix, layer_above, layer_own = prefix, above, own
            layer_done = tl.full([HP], 0 if ADAPTIVE else 1, tl.int32)
            if (phase > 0) & (phase < 9):  # that is, after a pass
                prefix, above, done, own = _all_digits(HISTOGRAMS, STATE, phase, heads, floor, places, False, HP)
                reach = above + own  # entries at or above the digits so far
                limit = prefix << (64 - 8 * phase)
                if ADAPTIVE:
                    layer_prefix, layer_above, layer_done, layer_own = _all_digits(
                        HISTOGRAMS, STATE, phase, heads, floor, places, True, HP
                    )
                    wider = layer_above + layer_own > reach
                    reach = tl.where(wider, layer_above + layer_own, reach)
                    limit = tl.where(wider, layer_prefix << (64 - 8 * phase), limit)
                reach = tl.where(tl.arange(0, HP) < heads, reach, 0)
                if tl.sum(reach.to(tl.int64), 0) <= spare:
                    ended = tl.full((), 1, tl.int32)
                    if writes:
                        tl.store(COUNTERS + HEADER - 1, phase + 1)
                        _store_counts(COUNTS, OFFSETS, heads, floor, reach, ADAPTIVE, HP)
                    begin = _of(tl.cumsum(reach, 0) - reach, head, HP)
                    lowest = _of(limit, head, HP)
                    if phase <= 4:  # nothing but zeros stands in the lower half of the limit
                        least = (lowest >> 32).to(tl.int32)
                        for tile in range(block, tiles, programs):
                            lines = tile * BLOCK + tl.arange(0, BLOCK)
                            high = (
                                my_high
                                if ONE
                                else _high_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
                            )
                            keep = (lines < n) & (high >= least)
                            keys = _key_of(SCORES, high, head, lines, keep, n, forced_first, forced_from)
                            _append(KEYS, LINES, CURSORS + head, begin, keys, lines, keep)
                    else:
                        for tile in range(block, small_tiles, programs):
                            lines = tile * SMALL + tl.arange(0, SMALL)
                            high = _high_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
                            keys = _key_of(SCORES, high, head, lines, lines < n, n, forced_first, forced_from)
                            _append(KEYS, LINES, CURSORS + head, begin, keys, lines, (lines < n) & (keys >= lowest))
            if ended == 0:
                if phase < PASSES:
                    if writes:
                        _store_state(STATE, phase, heads, prefix, above, done, HP)
                        if ADAPTIVE:
                            _store_state(LAYER_STATE, phase, heads, layer_prefix, layer_above, layer_done, HP)
                    my_prefix, my_done = _of(prefix, head, HP), _of(done, head, HP)
                    its_prefix, its_done = _of(layer_prefix, head, HP), _of(layer_done, head, HP)
                    row = phase * heads + head
                    counts_own = my_done == 0
                    counts_layer = (its_done == 0) & ((my_prefix != its_prefix) | (my_done != 0))
                    if phase < 4:
                        for tile in range(block, tiles, programs):
                            lines = tile * BLOCK + tl.arange(0, BLOCK)
                            high = (
                                my_high
                                if ONE
                                else _high_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
                            )
                            if counts_own:
                                _add_digits(
                                    HISTOGRAMS, high, lines < n, my_prefix.to(tl.int32), 24 - 8 * phase, phase, row
                                )
                            if ADAPTIVE:  # noqa: SIM102 (known when the kernel is made)
                                if counts_layer:
                                    _add_digits(
                                        LAYER_HISTOGRAMS,
                                        high,
                                        lines < n,
                                        its_prefix.to(tl.int32),
                                        24 - 8 * phase,
                                        phase,
                                        row,
                                    )
                    else:
                        for tile in range(block, small_tiles, programs):
                            lines = tile * SMALL + tl.arange(0, SMALL)
                            high = _high_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
                            keys = _key_of(SCORES, high, head, lines, lines < n, n, forced_first, forced_from)
                            if counts_own:
                                _add_digits(HISTOGRAMS, keys, lines < n, my_prefix, 56 - 8 * phase, phase, row)
                            if ADAPTIVE:  # noqa: SIM102
                                if counts_layer:
                                    _add_digits(
                                        LAYER_HISTOGRAMS, keys, lines < n, its_prefix, 56 - 8 * phase, phase, row
                                    )
                elif phase == PASSES:
                    limit, equal, kept = _settled(
                        prefix,
                        above,
                        done,
                        layer_prefix,
                        layer_above,
                        layer_done,
                        layer_own,
                        heads,
                        floor,
                        places,
                        ADAPTIVE,
                        HP,
                    )
                    if writes:
                        every = tl.arange(0, HP)
                        tl.store(limits + every, limit, mask=every < heads)
                        tl.store(limits + heads + every, equal.to(tl.int64), mask=every < heads)
                        _store_counts(COUNTS, OFFSETS, heads, floor, kept, ADAPTIVE, HP)
                    lowest = _of(limit, head, HP)
                    for tile in range(block, small_tiles, programs):
                        lines = tile * SMALL + tl.arange(0, SMALL)
                        high = _high_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
                        keys = _key_of(SCORES, high, head, lines, lines < n, n, forced_first, forced_from)
                        more = tl.sum(((lines < n) & (keys > lowest)).to(tl.int32), 0)
                        same = tl.sum(((lines < n) & (keys == lowest)).to(tl.int32), 0)
                        tl.store(ABOVE + head * small_tiles + tile, more)
                        tl.store(ABOVE + (heads + head) * small_tiles + tile, same)
                else:
                    lowest, needed = tl.load(limits + head), tl.load(limits + heads + head).to(tl.int32)
                    for tile in range(block, small_tiles, programs):
                        lines = tile * SMALL + tl.arange(0, SMALL)
                        high = _high_of(SCORES, RANKED, head, lines, n, forced_first, forced_from, POOL)
                        keys = _key_of(SCORES, high, head, lines, lines < n, n, forced_first, forced_from)
                        _compact(
                            ABOVE, OFFSETS, KEYS, LINES, keys, lines, n, lowest, needed, head, heads, tile, small_tiles
                        )


@triton.jit
def _compact(ABOVE, OFFSETS, KEYS, LINES, keys, lines, n, limit, needed, head, heads, tile, tiles):
    """The kept entries of a tile, behind those of its head's tiles before it."""
    more = tl.zeros([128], tl.int32)
    same = tl.zeros([128], tl.int32)
    for start in range(0, tile, 128):
        other = start + tl.arange(0, 128)
        more += tl.load(ABOVE + head * tiles + other, mask=other < tile, other=0)
        same += tl.load(ABOVE + (heads + head) * tiles + other, mask=other < tile, other=0)
    ties = tl.sum(same, 0)
    slot = tl.load(OFFSETS + head) + tl.sum(more, 0) + tl.minimum(ties, needed)
    equal = ((lines < n) & (keys == limit)).to(tl.int32)
    tie = ties + tl.cumsum(equal, 0) - equal
    keep = (lines < n) & ((keys > limit) | ((equal == 1) & (tie < needed)))
    taken = keep.to(tl.int32)
    slots = slot + tl.cumsum(taken, 0) - taken
    tl.store(KEYS + slots, keys, mask=keep)
    tl.store(LINES + slots, lines, mask=keep)
