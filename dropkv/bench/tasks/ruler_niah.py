"""RULER's eight needle tasks, RULER-shaped: its haystacks, kinds and numbers of needles and its scoring, our wording.

niah_single_1 hides one number in a repeated line, niah_single_2 and _3 a number and a uuid in prose; niah_multikey_1
hides four keys in prose, _2 and _3 one among lines that are needles themselves (_3: keys and values are uuids);
niah_multivalue has four numbers for one key, niah_multiquery asks for the numbers of four keys.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dropkv.bench.tasks._base import Frame, Made, Question, Task
from dropkv.bench.tasks._text import Haystack, insert
from dropkv.bench.tasks._words import listed, number, uuid4, word_list

MAX_NEW_TOKENS = 128
DEPTHS = tuple(round(100 * step / 39) for step in range(40))  # in percent; a document takes no depth twice
NOISE = "The road is long. The wind is cold. The lamp is lit. Somebody waits. Nothing more happens.\n"


@dataclass(frozen=True)
class Shape:
    """What is hidden where: numbers of keys, of values for each key, and of keys asked for."""

    hay: Literal["noise", "prose", "needles"]
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1


SHAPES = {
    "niah_single_1": Shape("noise"),
    "niah_single_2": Shape("prose"),
    "niah_single_3": Shape("prose", value="uuid"),
    "niah_multikey_1": Shape("prose", keys=4),
    "niah_multikey_2": Shape("needles"),
    "niah_multikey_3": Shape("needles", key="uuid", value="uuid"),
    "niah_multivalue": Shape("prose", values=4),
    "niah_multiquery": Shape("prose", keys=4, asked=4),
}
NAMES = tuple(SHAPES)


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    task = RulerNeedles(name, "RULER-shaped", MAX_NEW_TOKENS, shape=SHAPES[name], essay=essay)
    if task.shape.key == "word":
        task.words  # noqa: B018  reports a missing word list before a run begins
    return task


@dataclass(frozen=True)
class RulerNeedles(Task):
    """essay: text file of the prose haystacks, None for Python's help texts."""

    shape: Shape = Shape("prose")
    essay: str | None = None

    @cached_property
    def words(self) -> tuple[list[str], list[str]]:
        """Adjectives and nouns; a key joins one of each."""
        return word_list("adjective"), word_list("noun")

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        shape, plural = self.shape, self.shape.values * self.shape.asked > 1
        introduction = frame.encode(_introduction(shape, plural))
        prose = Haystack.read(frame, self.essay) if shape.hay == "prose" else None
        for index in itertools.count():
            draw = random.Random(f"{self.name} {seed} {index}")
            values: dict[str, list[str]] = {}
            while len(values) < shape.keys:
                values[self._key(draw)] = [self._value(draw) for _ in range(shape.values)]
            needles = [self._needle(frame, key, value) for key in values for value in values[key]]
            draw.shuffle(needles)
            fixed = len(introduction) + sum(map(len, needles))
            room = frame.room - fixed
            if room < 1:
                raise frame.short(fixed + 1)
            if prose is not None:
                hay = prose.window(frame, draw, room)
                depths = sorted(draw.sample(DEPTHS, len(needles)))
                body = hay.insert([hay.place(depth / 100) for depth in depths], needles)
            else:
                lines = self._lines(frame, draw, room, frozenset(values))
                # A needle goes before any of the lines, the cut one at the end included.
                starts = list(itertools.accumulate((len(line) for line in lines[:-1]), initial=0))
                if len(starts) < len(needles):
                    raise frame.short(fixed + sum(map(len, lines)) + 1)
                places = sorted(draw.sample(starts, len(needles)))
                body = insert([token for line in lines for token in line], places, needles)
            asked = draw.sample(list(values), shape.asked)
            answers = tuple(value for key in asked for value in values[key])
            yield Made(introduction + body, (self._question(listed(asked), answers),))

    def _lines(self, frame: Frame, draw: random.Random, room: int, taken: frozenset[str]) -> list[list[int]]:
        """Haystack lines of `room` tokens; the last one is cut to fit."""
        noise = frame.encode(NOISE)
        lines: list[list[int]] = []
        while room > 0:
            line = noise
            if self.shape.hay == "needles":
                key = self._key(draw)
                if key in taken:
                    continue
                line = self._needle(frame, key, self._value(draw))
            lines.append(line[:room])
            room -= len(line)
        return lines

    def _key(self, draw: random.Random) -> str:
        if self.shape.key == "uuid":
            return uuid4(draw)
        adjectives, nouns = self.words
        return f"{draw.choice(adjectives)}-{draw.choice(nouns)}"

    def _value(self, draw: random.Random) -> str:
        return uuid4(draw) if self.shape.value == "uuid" else number(draw)

    def _needle(self, frame: Frame, key: str, value: str) -> list[int]:
        start = " " if self.shape.hay == "prose" else ""
        return frame.encode(f"{start}A secret {self.shape.value} of {key} is: {value}.\n")

    def _question(self, who: str, answers: tuple[str, ...]) -> Question:
        kind = self.shape.value
        if len(answers) == 1:
            asked = f"\nWhat is the secret {kind} of {who} that the text above gives?"
            prefix = f"The secret {kind} of {who} that the text above gives is"
        else:
            asked = f"\nWhat are all the secret {kind}s of {who} that the text above gives?"
            prefix = f"The secret {kind}s of {who} that the text above gives are"
        return Question(asked, prefix, answers, self.max_new_tokens)


def _introduction(shape: Shape, plural: bool) -> str:
    what, them = (f"Secret {shape.value}s are", "them") if plural else (f"A secret {shape.value} is", "it")
    return f"{what} hidden in the text below. Keep {them} in mind, for you will be asked about {them} later.\n"
