"""RULER's frequent words, RULER-shaped: its coded words, their frequencies, answer length and scoring, our wording.

Made-up words of six letters follow Zipf's law with exponent 2; the most frequent one is "...", which does not count, and
the next three are asked for. What the words leave free is filled with more dots.
"""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Iterator

from dropkv.bench.tasks._base import Frame, Made, Question, Task

NAMES = ("fwe",)
LETTERS = 6
TOKENS_A_WORD = 50  # the vocabulary has one word for so many tokens of the length
ZETA_2 = math.pi**2 / 6
DOTS = "..."
ASKED = 3
INTRODUCTION = (
    "The text below is in code. Count how often each coded word stands in it, and find the three most frequent ones.\n"
)
QUESTION = (
    "\nQuestion: Which three coded words stand most often in the text above? Leave out the dots, and explain nothing."
)
ANSWER = "Answer: The three coded words that stand most often in the text above are:"


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    return FrequentWords(name, "RULER-shaped", 50)


class FrequentWords(Task):
    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        introduction = frame.encode(INTRODUCTION)
        room = frame.room - len(introduction)
        for index in itertools.count():
            draw = random.Random(f"{self.name} {seed} {index}")
            words = [DOTS, *_coded(draw, max(frame.length // TOKENS_A_WORD, ASKED + 2) - 1)]
            pieces = [frame.encode(f" {word}") for word in words]
            sizes = [len(piece) for piece in pieces]
            counts = _counts(_largest(sizes, room), len(words))
            if counts[ASKED] <= counts[ASKED + 1]:  # the third word would not stand out from the fourth
                needed = next(n for n in itertools.count(1) if (c := _counts(n, len(words)))[ASKED] > c[ASKED + 1])
                raise frame.short(len(introduction) + _tokens(_counts(needed, len(words)), sizes))
            order = [rank for rank, count in enumerate(counts) for _ in range(count)]
            draw.shuffle(order)
            ids = [token for rank in order for token in pieces[rank]]
            dots = pieces[0] * (room - len(ids))
            ids = introduction + ids + dots[: room - len(ids)]
            question = Question(QUESTION, ANSWER, tuple(words[1 : ASKED + 1]), self.max_new_tokens)
            yield Made(ids, (question,))


def _coded(draw: random.Random, count: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(string.ascii_lowercase, k=LETTERS))] = None
    return list(words)


def _counts(total: int, words: int) -> list[int]:
    """How often each rank stands in a text of about `total` words."""
    return [int(total / (rank * rank * ZETA_2)) for rank in range(1, words + 1)]


def _tokens(counts: list[int], sizes: list[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _largest(sizes: list[int], room: int) -> int:
    """The largest number of words whose text fits into `room` tokens."""
    low, high = 0, 2 * max(room, 0) + 1  # the dots alone are more than half of the words
    while low < high:
        middle = (low + high + 1) // 2
        if _tokens(_counts(middle, len(sizes)), sizes) <= room:
            low = middle
        else:
            high = middle - 1
    return low
