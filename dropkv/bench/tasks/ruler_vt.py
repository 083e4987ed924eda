"""RULER's variable tracking, RULER-shaped: its chains, worked example, answer length and scoring, our wording.

A value goes through five variables; their assignments stand in order among lines of noise. One worked example of up to
500 tokens comes first, as in RULER.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator

from dropkv.bench.tasks._base import Frame, Made, Question, Task
from dropkv.bench.tasks._text import insert
from dropkv.bench.tasks._words import number
from dropkv.bench.tasks.ruler_niah import NOISE

NAMES = ("vt",)
HOPS = 4
EXAMPLE_TOKENS = 500
INTRODUCTION = "Follow the variables that are assigned, one from another, in the text below.\n\n"
QUESTION = "\nQuestion: Which variables hold the value {value} in the text above?"
ANSWER = "Answer: By the assignments in the text above, the {count} variables that hold the value {value} are:"


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    return Tracking(name, "RULER-shaped", 30)


class Tracking(Task):
    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        introduction = frame.encode(INTRODUCTION)
        for index in itertools.count():
            draw = random.Random(f"{self.name} {seed} {index}")
            example = self._example(frame, draw, min(EXAMPLE_TOKENS, frame.room // 3))
            names, value = _names(draw, 5), number(draw, 5)
            chain = [frame.encode(line) for line in _chain(names, value)]
            fixed = len(example) + len(introduction) + sum(map(len, chain))
            text = _hide(frame, draw, chain, frame.room - fixed)
            if text is None:
                # Each line of the chain wants a place of its own among those of the noise.
                raise frame.short(fixed + HOPS * len(frame.encode(NOISE)) + 1)
            question = Question(
                QUESTION.format(value=value), ANSWER.format(count=len(names), value=value), names, self.max_new_tokens
            )
            yield Made(example + introduction + text, (question,))

    def _example(self, frame: Frame, draw: random.Random, tokens: int) -> list[int]:
        """A worked example of at most `tokens` tokens, or as many as its chain takes."""
        names, value = _names(draw, 3), number(draw, 5)
        asked = QUESTION.format(value=value) + " " + ANSWER.format(count=len(names), value=value)
        start, end = frame.encode(INTRODUCTION), frame.encode(f"{asked} {' '.join(names)}\n\n")
        chain = [frame.encode(line) for line in _chain(names, value)]
        noise = len(frame.encode(NOISE))
        lines = max((tokens - len(start) - len(end) - sum(map(len, chain))) // noise, len(chain))
        text = _hide(frame, draw, chain, lines * noise)
        assert text is not None
        return start + text + end


def _hide(frame: Frame, draw: random.Random, chain: list[list[int]], room: int) -> list[int] | None:
    """The chain among `room` tokens of noise; None when the noise has fewer places than the chain has lines."""
    noise = frame.encode(NOISE)
    places = range(0, room, len(noise))
    if len(places) < len(chain):
        return None
    return insert((noise * len(places))[:room], sorted(draw.sample(places, len(chain))), chain)


def _names(draw: random.Random, letters: int) -> tuple[str, ...]:
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
    return tuple(names)


def _chain(names: tuple[str, ...], value: str) -> list[str]:
    later = [f"VAR {name} = VAR {before}\n" for before, name in itertools.pairwise(names)]
    return [f"VAR {names[0]} = {value}\n", *later]
