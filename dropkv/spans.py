"""How a sequence is cut for a prefill: slices of the document, then its probes, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dropkv.observers import Probe

SLICE = 2048  # document tokens a layer computes at once


@dataclass(frozen=True)
class Span:
    """One slice of the sequence: document tokens, or exactly one probe (the held-out text is one that observes nothing)."""

    start: int
    stop: int
    probe: Probe | None


def plan_spans(n: int, probes: Sequence[Probe], size: int) -> tuple[Span, ...]:
    """Slices of at most `size` document tokens, then one per probe."""
    spans = [Span(start, min(n, start + size), None) for start in range(0, n, size)]
    for probe in probes:
        start = spans[-1].stop
        spans.append(Span(start, start + len(probe.ids), probe))
    return tuple(spans)


def range_of(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """All positions of ascending (start, stop) ranges."""
    return [position for start, stop in ranges for position in range(start, stop)]
