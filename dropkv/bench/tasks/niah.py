"""NIAH, one needle in prose, over a grid of depths: sample i has the depth i mod 11 tenths, so any 11 in a row hold all.

The wording is ours, and an answer counts when it holds the number. Run it at several lengths for the grid.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from dropkv.bench.tasks._base import Frame, Made, Question, Task
from dropkv.bench.tasks._text import Haystack
from dropkv.bench.tasks._words import number

NAMES = ("niah",)
DEPTHS = tuple(tenth / 10 for tenth in range(11))
PLACES = "Aarhus Bergen Cadiz Dover Esbjerg Faro Genoa Hull Izmir Kiel Lisbon Malmo Naples Odessa Porto Riga Split Turku Vigo"


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    return DepthGrid(name, "NIAH", 32, essay=essay)


@dataclass(frozen=True)
class DepthGrid(Task):
    """essay: text file of the haystack, None for Python's help texts."""

    essay: str | None = None

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        text = Haystack.read(frame, self.essay)
        for index in itertools.count():
            draw = random.Random(f"{self.name} {seed} {index}")
            depth = DEPTHS[index % len(DEPTHS)]
            place, value = draw.choice(PLACES.split()), number(draw)
            needle = frame.encode(f" The number of the safe in {place} is {value}.\n")
            if len(needle) >= frame.room:
                raise frame.short(len(needle) + 1)
            hay = text.window(frame, draw, frame.room - len(needle))
            question = Question(
                f"\nWhat is the number of the safe in {place}, by the text above?",
                f"The number of the safe in {place} is",
                (value,),
                self.max_new_tokens,
            )
            yield Made(hay.insert([hay.place(depth)], [needle]), (question,), depth)
