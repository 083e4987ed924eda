"""RULER's common words, RULER-shaped: its word counts, worked example, answer length and scoring, our wording.

A numbered list in which ten words stand more often than all others: 30 times against 3, below 4,096 tokens 6 against 1.
What the list leaves free is filled with further words that stand once; the last of them may be cut.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from dropkv.bench.tasks._base import Frame, Made, Question, Task
from dropkv.bench.tasks._words import word_list

NAMES = ("cwe",)
COMMON = 10
LONG = 4096  # from this length on, RULER repeats words more often
INTRODUCTION = "Here is a numbered list of words. Some words stand in it more often than others; keep those in mind.\n"
QUESTION = "\nQuestion: Which 10 words stand most often in the list above?"
ANSWER = "Answer: The 10 words that stand most often in the list are:"


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    task = CommonWords(name, "RULER-shaped", 120)
    task.words  # noqa: B018  reports a missing word list before a run begins
    return task


@dataclass(frozen=True)
class CommonWords(Task):
    @cached_property
    def words(self) -> list[str]:
        return sorted({word for kind in ("noun", "adjective", "verb") for word in word_list(kind)})

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        often, seldom = (30, 3) if frame.length >= LONG else (6, 1)
        piece = cache(frame.encode)
        introduction = frame.encode(INTRODUCTION)
        for index in itertools.count():
            draw = random.Random(f"{self.name} {seed} {index}")
            words = draw.sample(self.words, len(self.words))
            example = self._example(frame, draw, words)
            room = frame.room - len(example) - len(introduction)
            common, others = words[:COMMON], words[COMMON:]
            listed = common * often
            free = room - _tokens(piece, listed)
            if free < 0:
                raise frame.short(frame.room - free)
            taken = 0
            while taken < len(others):
                numbers = range(len(listed) + 1, len(listed) + seldom + 1)
                free -= seldom * len(piece(f" {others[taken]}")) + sum(len(piece(f" {place}.")) for place in numbers)
                if free < 0:
                    break
                listed += [others[taken]] * seldom
                taken += 1
            draw.shuffle(listed)
            ids = _list(piece, listed)
            fillers = iter(others[taken:])
            while len(ids) < room:
                filler = next(fillers, None)
                if filler is None:
                    raise frame.long(frame.room - room + len(ids), "its word list", "ask for a shorter one")
                listed.append(filler)
                ids += piece(f" {len(listed)}.") + piece(f" {filler}")
            question = Question(QUESTION, ANSWER, tuple(common), self.max_new_tokens)
            yield Made(example + introduction + ids[:room], (question,))

    def _example(self, frame: Frame, draw: random.Random, words: list[str]) -> list[int]:
        """A short list with its answer; its words are taken off `words`, so that none is asked for again."""
        count, often, seldom = (40, 10, 3) if frame.length >= LONG else (20, 3, 1)
        used, words[:] = words[:count], words[count:]
        listed = used[:COMMON] * often + used[COMMON:] * seldom
        draw.shuffle(listed)
        text = "".join(f" {place}. {word}" for place, word in enumerate(listed, 1))
        answer = "".join(f" {place}. {word}" for place, word in enumerate(used[:COMMON], 1))
        return frame.encode(f"{INTRODUCTION}{text}{QUESTION} {ANSWER}{answer}\n\n")


def _list(piece: Callable[[str], list[int]], words: list[str]) -> list[int]:
    return [
        token for place, word in enumerate(words, 1) for part in (f" {place}.", f" {word}") for token in piece(part)
    ]


def _tokens(piece: Callable[[str], list[int]], words: list[str]) -> int:
    return len(_list(piece, words))
