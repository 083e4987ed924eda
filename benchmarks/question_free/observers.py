"""Observers of several kinds: replays (chunks, instructions, what a replay sees, and in which order it repeats), requests alone, and what the
model itself asks about each chunk."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.question_free.observe import Replay
from dropkv.observers import Observation, Probe
from dropkv.observers.replay import INSTRUCTION, SINKS
from dropkv.prompts import Seam

CHUNK = 512
OUTLINE = "Write an outline of this text."
TASK = "You will be asked for numbers and names that the text mentions."


@dataclass(frozen=True)
class Exchange:
    """A question about a chunk, and its answer."""

    question: str
    answer: str


def chunks_of(n: int, head_tokens: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Where the chunks of a document of n tokens begin and end; what stands before the first are sinks."""
    sinks = min(n, max(SINKS, head_tokens))
    return ((start, min(n, start + size)) for start in range(sinks, n, size))


@dataclass(frozen=True)
class Observer:
    """How probes are made: tokens of a chunk, the instruction, what a probe sees besides its chunk and the sinks ("chunk" nothing,
    "neighbours" the chunks before and after, "all" the document), and in which order a replay repeats: as it stands, or in pieces of so many
    tokens, shuffled. repeats: whether the chunk follows the instruction, or nothing does. own: in place of the instruction each of the model's
    own "questions" about the chunk, or "answers", those with their answers behind them."""

    chunk: int = CHUNK
    instruction: str = INSTRUCTION
    sees: str = "chunk"
    pieces: int = 0
    repeats: bool = True
    own: str = ""

    def plan(
        self, seam: Seam, document: Sequence[int], head_tokens: int, exchanges: Sequence[Sequence[Exchange]] = ()
    ) -> tuple[Observation, list[Replay]]:
        """The probes of a document (ids, template head included), chunk after chunk: first one of each, then the second of those that have more.
        exchanges: of each chunk, for observers of the model's own texts."""
        n = len(document)
        sinks = min(n, max(SINKS, head_tokens))
        chunks = list(chunks_of(n, head_tokens, self.chunk))
        asking = [[tuple(seam.question_ids(self.instruction))] for _ in chunks]
        if self.own:
            asking = [[self._said(seam, one) for one in own] for own in exchanges]
        probes, replays = [], []
        for turn in range(max(map(len, asking))):
            for (start, stop), texts in zip(chunks, asking, strict=True):
                if turn >= len(texts):
                    continue
                seen = [(0, sinks)]
                if self.sees != "chunk":
                    reach = n if self.sees == "all" else self.chunk
                    seen += [(max(sinks, start - reach), start), (stop, min(n, stop + reach))]
                ranges = tuple((low, high) for low, high in seen if low < high)
                places = list(range(start, stop)) if self.repeats and not self.own else []
                if self.pieces:
                    cut = [places[low : low + self.pieces] for low in range(0, len(places), self.pieces)]
                    random.Random(0).shuffle(cut)  # all chunks in one order, so that those of one shape go together
                    places = [place for piece in cut for place in piece]
                ids = texts[turn] + tuple(document[place] for place in places)
                probes.append(Probe(ids, (start, stop), ranges))
                replays.append(Replay.of(len(texts[turn]), places, start, turn))
        return Observation(0, tuple(probes), {"name": "replay", "chunk": self.chunk}), replays

    def _said(self, seam: Seam, exchange: Exchange) -> tuple[int, ...]:
        """A question, and with "answers" its answer, as they would stand behind the document."""
        answer = seam.answer_ids(exchange.answer) if self.own == "answers" else []
        return (*seam.question_ids(exchange.question), *answer)


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
    "own questions": Observer(own="questions"),
    "own answers": Observer(own="answers"),
    "outline and replay": Observer(instruction=OUTLINE),
    "outline alone": Observer(instruction=OUTLINE, repeats=False),
    "task and replay": Observer(instruction=f"{TASK} {INSTRUCTION}"),
    "task alone": Observer(instruction=TASK, repeats=False),
}
