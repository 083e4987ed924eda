"""Replays of several kinds: chunks, instructions, what a replay sees, and in which order it repeats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.question_free.observe import Replay
from dropkv.observers import Observation, Probe
from dropkv.observers.replay import INSTRUCTION, SINKS
from dropkv.prompts import Seam


@dataclass(frozen=True)
class Observer:
    """How replays are made: tokens of a chunk, the instruction, what a replay sees besides its chunk and the sinks ("chunk" nothing,
    "neighbours" the chunks before and after, "all" the document), and in which order: as it stands, or in pieces of so many tokens, shuffled."""

    chunk: int = 512
    instruction: str = INSTRUCTION
    sees: str = "chunk"
    pieces: int = 0

    def plan(self, seam: Seam, document: Sequence[int], head_tokens: int) -> tuple[Observation, list[Replay]]:
        """The replays of a document (ids, template head included)."""
        n = len(document)
        sinks = min(n, max(SINKS, head_tokens))
        asking = tuple(seam.question_ids(self.instruction))
        probes, replays = [], []
        for start in range(sinks, n, self.chunk):
            stop = min(n, start + self.chunk)
            seen = [(0, sinks)]
            if self.sees != "chunk":
                reach = n if self.sees == "all" else self.chunk
                seen += [(max(sinks, start - reach), start), (stop, min(n, stop + reach))]
            ranges = tuple((low, high) for low, high in seen if low < high)
            places = list(range(start, stop))
            if self.pieces:
                cut = [places[low : low + self.pieces] for low in range(0, len(places), self.pieces)]
                random.Random(0).shuffle(cut)  # all chunks in one order, so that those of one shape go together
                places = [place for piece in cut for place in piece]
            probes.append(Probe(asking + tuple(document[place] for place in places), (start, stop), ranges))
            replays.append(Replay.of(len(asking), places, start))
        return Observation(0, tuple(probes), {"name": "replay", "chunk": self.chunk}), replays


OBSERVERS = {
    "replay": Observer(),
    "replay 256": Observer(chunk=256),
    "replay 1024": Observer(chunk=1024),
    "sees neighbours": Observer(sees="neighbours"),
    "sees all": Observer(sees="all"),
    "questions": Observer(
        instruction="Answer questions about the text above: what does it say, and which names and numbers does it give?"
    ),
    "outline": Observer(
        instruction="Write down every fact, name and number of the previous context, in its own words."
    ),
    "pieces 8": Observer(pieces=8),
    "pieces 24": Observer(pieces=24),
}
