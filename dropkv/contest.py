"""What the entries of a head have to reach to be kept, while layers are still to come.

Who has a part in the shared budget is known at the end, but a head that has one then has one all along, and so have those above it: what these
put before an entry is before it for ever. So an entry with as many before it as there are places is out. Of long documents only every so-manieth
entry is looked at, which lets a few more stay than could.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dropkv.candidates import Candidates, begins, sent

LOOKED_AT = 1 << 16  # entries, or a few more
FINE = 16  # heads of rank k are held to one bar with those up to k / FINE below


@dataclass(frozen=True)
class Contest:
    """The heads so far, as far as later ones have to know them. levels float64 [heads]; bars float32 [sharing + 1]: what an entry has to reach
    when so many of these heads are above its own."""

    levels: Tensor
    bars: Tensor

    def bar(self, levels: Tensor) -> Tensor:
        """For new heads of levels [kv_heads]."""
        above = (self.levels >= levels.unsqueeze(1)).sum(1)
        return self.bars[above.clamp(max=len(self.bars) - 1)]


def hold(
    candidates: Candidates,
    levels: Sequence[float],
    floor: int,
    places: int,
    sharing: int,
    heads: int,
    looked_at: int = LOOKED_AT,
) -> tuple[list[int], Contest]:
    """How many entries of every head can still be kept, and what later heads have to know. Waits for the device once.

    levels: of every head so far. floor: the first so many of each head are kept in any case; the others fall in `first`, and `places` > 0 of them
    are kept in all. heads: of all layers; the `sharing` of them with the highest level share the places. looked_at: how many entries suffice.
    """
    ranked = by_level(levels)[:sharing]
    counts = [floor] * len(levels)
    free = [candidates.counts[head] - floor for head in ranked]
    sure = sharing - (heads - len(levels))  # so many have a part whatever comes
    parts = [*steps(len(ranked), sure)]
    last = [max(start, sure - 1) for start, _ in parts]  # a part competes with the entries of ranks up to this
    device = candidates.first.device
    lowest = torch.full((1,), -torch.inf, device=device)
    if sum(free) <= places:
        kept, least = free, lowest.expand(len(parts))
    else:
        stride = max(1, sum(free) // looked_at)
        picks = [size // stride for size in free]
        start, before = candidates.begins(), begins(picks)
        of_pick = [start[head] + floor + stride - 1 - stride * own for head, own in zip(ranked, before, strict=True)]
        of_rank = [part for part, (first, stop) in enumerate(parts) for _ in range(first, stop)]
        many, offset, part, begin = sent([picks, of_pick, of_rank, before], device)
        rank = torch.repeat_interleave(torch.arange(len(picks), device=device), many, output_size=sum(picks))
        values = candidates.first[offset[rank] + stride * torch.arange(len(rank), device=device)]
        best = torch.sort(values, descending=True)
        ahead = (rank[best.indices] <= sent(last, device).unsqueeze(1)).cumsum(1, dtype=torch.int32)
        full = torch.full((len(parts), 1), -(-places // stride), dtype=torch.int32, device=device)
        least = torch.cat([best.values, lowest])[torch.searchsorted(ahead, full)[:, 0]]
        reached = F.pad((values >= least[part][rank]).cumsum(0), (1, 0))
        found = (reached[begin + many] - reached[begin]).tolist()
        kept = [min(size, stride * (many + 1) - 1) for size, many in zip(free, found, strict=True)]
    for head, count in zip(ranked, kept, strict=True):
        counts[head] += count
    # a later head competes with as many of these as are above it, or are sure; the last bar is for those without a part
    bars = [bisect(last, max(above, sure) - 1) for above in range(sharing)]
    scale = torch.cat([lowest, least, -lowest])
    return counts, Contest(sent(levels, device, torch.float64), scale[sent([*bars, len(scale) - 1], device)])


def by_level(levels: Sequence[float]) -> list[int]:
    """Heads, the highest level first, ties to the earlier."""
    return sorted(range(len(levels)), key=lambda head: (-levels[head], head))


def steps(ranks: int, sure: int) -> Iterator[tuple[int, int]]:
    """Ranks in parts (first, behind the last) that are held to one bar: those that have a part in any case, and some neighbours each."""
    start = 0
    while start < ranks:
        stop = min(max(start + max(1, start // FINE), sure), ranks)
        yield start, stop
        start = stop
