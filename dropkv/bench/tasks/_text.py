"""Haystacks: long texts in tokens, cut to any length, and where in them a sentence ends."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from dropkv.bench.tasks._base import Frame
from dropkv.documents import read_document
from formats.errors import show_path

HELP_TEXTS = "the help texts that come with Python"
# How vocabularies write white space: as it is, moved up by 256 in byte-level ones, and U+2581 for a space.
_LINE_ENDS = ("\u010a", "\n")
_SPACES = ("\u0120", "\u2581", "\u010d", "\u0109", " ", "\r", "\t", *_LINE_ENDS)


def help_texts() -> str:
    """The texts behind Python's help(): long English prose that is on every machine."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True)
class Haystack:
    """A text in tokens. ends: ascending positions right behind a sentence. source: what to call it in messages."""

    ids: list[int]
    ends: list[int]
    source: str

    @classmethod
    def read(cls, frame: Frame, essay: str | None) -> Haystack:
        """The text file `essay`, or Python's help texts; raises DocumentError for what cannot be read."""
        text = help_texts() if essay is None else read_document(essay).text
        ids = frame.encode(text)
        return cls(ids, sentence_ends(frame, ids), HELP_TEXTS if essay is None else show_path(essay))

    def window(self, frame: Frame, draw: random.Random, tokens: int) -> Haystack:
        """A stretch of `tokens` tokens that starts where a sentence does; raises UsageError when there are too few."""
        spare = len(self.ids) - tokens
        if spare < 0:
            raise frame.long(len(self.ids), self.source, "give a longer text as essay, or a shorter length")
        starts = [0, *(end for end in self.ends if end <= spare)]
        start = draw.choice(starts)
        ends = [end - start for end in self.ends if start < end <= start + tokens]
        return Haystack(self.ids[start : start + tokens], ends, self.source)

    def place(self, depth: float) -> int:
        """The end of a sentence (or of the text) nearest to a depth of 0 to 1."""
        wanted = round(depth * len(self.ids))
        places = [0, *self.ends, len(self.ids)]
        after = bisect_left(places, wanted)
        return min(places[max(after - 1, 0) : after + 1], key=lambda place: abs(place - wanted))

    def insert(self, places: Sequence[int], pieces: Sequence[list[int]]) -> list[int]:
        """The ids with the pieces put in, the first piece at the first place; `places` ascending."""
        return insert(self.ids, places, pieces)


def insert(ids: list[int], places: Sequence[int], pieces: Sequence[list[int]]) -> list[int]:
    """`ids` with a piece put in at each of the ascending places."""
    body: list[int] = []
    last = 0
    for place, piece in zip(places, pieces, strict=True):
        body += ids[last:place] + piece
        last = place
    return body + ids[last:]


def sentence_ends(frame: Frame, ids: Sequence[int]) -> list[int]:
    """Positions behind a full stop, question or exclamation mark that white space follows, and behind empty lines."""
    marks = {index: str(frame.tokenizer.convert_ids_to_tokens(index)).replace("<0x0A>", "\n") for index in set(ids)}
    line_ends = {index: sum(map(mark.count, _LINE_ENDS)) for index, mark in marks.items() if mark.endswith(_LINE_ENDS)}
    stops = {index for index, mark in marks.items() if mark.endswith((".", "!", "?"))}
    spaced = {index for index, mark in marks.items() if mark.startswith(_SPACES)}
    ends = []
    lines = 0  # line ends right before this position
    for position, index in enumerate(ids, 1):
        lines = lines + line_ends[index] if index in line_ends else 0
        after = ids[position] if position < len(ids) else None
        if (lines > 1 and after not in line_ends) or (index in stops and (after is None or after in spaced)):
            ends.append(position)
    return ends
