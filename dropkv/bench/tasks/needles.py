"""The five needle tasks: magic numbers for words in a repeated line or in prose, the same documents for the same seed
whatever the machine or the task before it.

noise: a line over and over, one number.  prose: Python's help texts, one number.  four-keys: numbers of four words, one
is asked for.  four-values: four numbers of one word, all are asked for.  four-queries: numbers of four words, all asked.
A needle may stand anywhere, in the middle of a word too. An answer counts as the share of its numbers that it holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from dropkv.bench.tasks._base import Frame, Made, Question, Task
from dropkv.bench.tasks._text import HELP_TEXTS, help_texts, insert
from dropkv.bench.tasks._words import listed

NAMES = ("noise", "prose", "four-keys", "four-values", "four-queries")
MAX_NEW_TOKENS = 32
MAX_NEW_TOKENS_FOUR = 64  # four numbers of seven digits, and some tokenizers spell them digit by digit
WORDS = (
    "apple river stone cloud tiger lemon chair music paper glass bread horse table plant ocean light metal house dream "
    "eagle field grape honey ivory jewel knife lunar mango night olive piano queen robot sugar train uncle valley water "
    "zebra angel beach candy dance earth flame ghost heart island jungle"
)
NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    many = name in ("four-values", "four-queries")
    return Needles(name, "needle", MAX_NEW_TOKENS_FOUR if many else MAX_NEW_TOKENS)


class Needles(Task):
    """Its random numbers run on from sample to sample, so that a sample depends on how many came before it."""

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        draw = random.Random(seed)
        # As one text of its own: the published figures were measured so, special tokens recognised and all.
        encode = _encoder(frame)
        # Words of one token each, so that no key is harder to copy than another; any words where there are too few.
        short = [word for word in WORDS.split() if len(encode(" " + word)) == 1]
        words = short if len(short) >= 4 else WORDS.split()
        introduction = encode(INTRODUCTION)
        hay = encode(NOISE) if self.name == "noise" else encode(help_texts())
        while True:
            keys = draw.sample(words, 4 if self.name in ("four-keys", "four-queries") else 1)
            values = [_number(draw) for _ in range(4 if self.name == "four-values" else len(keys))]
            needles = list(zip(keys * 4 if self.name == "four-values" else keys, values, strict=False))
            asked = keys if self.name == "four-queries" else keys[:1]
            pieces = [encode(f" One of the special magic numbers for {key} is: {value}.") for key, value in needles]
            fixed = len(introduction) + sum(map(len, pieces))
            room = frame.room - fixed
            if room < 1:
                raise frame.short(fixed + 1)
            if self.name == "noise":
                body = (hay * (room // len(hay) + 1))[:room]
            elif room >= len(hay):
                raise frame.long(len(hay), HELP_TEXTS, "ask for a shorter one")
            else:
                start = draw.randrange(0, len(hay) - room)
                body = hay[start : start + room]
            places = sorted(draw.randrange(room) for _ in pieces)
            answers = tuple(value for key, value in needles if key in asked)
            ids = introduction + insert(body, places, pieces)
            yield Made(ids, (_question(listed(asked), answers, self.max_new_tokens),))


def _question(who: str, answers: tuple[str, ...], max_new_tokens: int) -> Question:
    plural, verb, ask = ("s", "are", "are all") if len(answers) > 1 else ("", "is", "is")
    return Question(
        f"\nWhat {ask} the special magic number{plural} for {who} mentioned in the provided text?",
        f"The special magic number{plural} for {who} mentioned in the provided text {verb}",
        answers,
        max_new_tokens,
    )


def _number(draw: random.Random) -> str:
    return "".join(draw.choice("0123456789") for _ in range(7))


def _encoder(frame: Frame) -> Callable[[str], list[int]]:
    return lambda text: list(frame.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
