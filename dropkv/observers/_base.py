"""The words of observation: probes and what is observed with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """Tokens appended at position n that see some document keys and themselves; their queries observe a part of those keys.

    ids: the probe's tokens. scored: the (start, stop) range of document positions they observe. seen: ranges they see besides.
    observing: only so many of the last tokens observe, None for all, 0 for none.
    """

    ids: tuple[int, ...]
    scored: tuple[int, int]
    seen: tuple[tuple[int, int], ...]
    observing: int | None = None


@dataclass(frozen=True)
class Observation:
    """One document's observation: the last `window` document queries, or probes; `description` goes into the file."""

    window: int
    probes: tuple[Probe, ...]
    description: dict[str, str | int]

    @property
    def longest_probe(self) -> int:
        """Positions that must be free behind the document."""
        return max((len(probe.ids) for probe in self.probes), default=0)
