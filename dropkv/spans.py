"""How a sequence is cut for a prefill: slices of the document, then its probes, one by one or in groups."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from dropkv.observers import Probe

SLICE = 2048  # document tokens a layer computes at once on a CPU
GPU_SLICES = (8192, 4096, 2048, 1024, 512)  # on a GPU the largest that memory has room for
SMALLEST = 64  # where even so many tokens do not fit, halving them does not help


@dataclass(frozen=True)
class Span:
    """One slice of the sequence: document tokens, or whole probes (the held-out text is one that observes nothing, and stands alone)."""

    start: int
    stop: int
    probes: tuple[Probe, ...] = ()


class Cuts:
    """Where the spans of a sequence [n document tokens; probes] end: at most `size` document tokens, then single probes or, `together`, as
    many as have no more than `size` tokens. `halve` makes all spans from then on smaller."""

    def __init__(self, n: int, probes: Sequence[Probe], size: int, *, together: bool = False) -> None:
        self.n = n
        self.size = size
        self.together = together
        self._probes = tuple(probes)
        self._ends = list(accumulate((len(probe.ids) for probe in probes), initial=n))

    def span(self, start: int) -> Span:
        """The span that begins at `start`, where another one ended."""
        if start < self.n:
            return Span(start, min(self.n, start + self.size))
        first = bisect_left(self._ends, start)
        last = first + 1
        while self.together and last < len(self._probes) and self._joins(first, last):
            last += 1
        return Span(start, self._ends[last], self._probes[first:last])

    def halve(self, span: Span) -> bool:
        """Cut finer, since memory ran out in `span`; False where it cannot be cut."""
        if span.stop - span.start <= SMALLEST or len(span.probes) == 1:
            return False
        self.size = max(SMALLEST, (min(self.size, span.stop - span.start) + 1) // 2)
        return True

    def _joins(self, first: int, last: int) -> bool:
        """Whether probe `last` fits behind those from `first` on."""
        alone = self._probes[first].observing == 0 or self._probes[last].observing == 0
        return not alone and self._ends[last + 1] - self._ends[first] <= self.size


def range_of(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """All positions of ascending (start, stop) ranges."""
    return [position for start, stop in ranges for position in range(start, stop)]
