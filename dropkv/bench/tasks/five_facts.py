"""Five facts in one document, asked one by one after a single compression: what a file that is kept is for.

One fact stands in each fifth of the document, in an order that changes from sample to sample.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from dropkv.bench.tasks._base import Frame, Made, Question, Task
from dropkv.bench.tasks._text import Haystack
from dropkv.bench.tasks._words import number

NAMES = ("five-facts",)
# A fact is "The SUBJECT is VALUE."; values have many digits, so that guessing scores nothing.
SUBJECTS = (
    "door code of the archive in {}",
    "account number of the baker in {}",
    "serial number of the engine in {}",
    "telephone number of the inn in {}",
    "call number of the atlas in {}",
)
PLACES = "Arden Brill Corwen Dunster Elgin Fowey Goole Hexham Ilkley Jarrow Kelso Ludlow Malton Nairn Oban"


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    return FiveFacts(name, "needle", 32, essay=essay)


@dataclass(frozen=True)
class FiveFacts(Task):
    """essay: text file of the haystack, None for Python's help texts."""

    essay: str | None = None

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        text = Haystack.read(frame, self.essay)
        for index in itertools.count():
            draw = random.Random(f"{self.name} {seed} {index}")
            places = draw.sample(PLACES.split(), len(SUBJECTS))
            subjects = [subject.format(place) for subject, place in zip(SUBJECTS, places, strict=True)]
            facts = [(subject, number(draw, 6)) for subject in subjects]
            pieces = [frame.encode(f" The {subject} is {value}.\n") for subject, value in facts]
            order = draw.sample(range(len(pieces)), len(pieces))
            fixed = sum(map(len, pieces))
            if frame.room < fixed + len(pieces):
                raise frame.short(fixed + len(pieces))
            hay = text.window(frame, draw, frame.room - fixed)
            depths = [(fifth + draw.random()) / len(pieces) for fifth in range(len(pieces))]
            ids = hay.insert([hay.place(depth) for depth in depths], [pieces[fact] for fact in order])
            questions = tuple(
                Question(f"\nWhat is the {subject}?", f"The {subject} is", (value,), self.max_new_tokens)
                for subject, value in facts
            )
            yield Made(ids, questions)
