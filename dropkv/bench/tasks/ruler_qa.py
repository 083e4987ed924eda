"""RULER's question answering, RULER-shaped: qa_1 from SQuAD 2.0 (answerable questions), qa_2 from HotpotQA, with RULER's
mixing of passages, answer length and scoring, our wording.

Needs the data sets' own files in a folder. The passages of the question stand whole among others, in an order that
changes from sample to sample; one of the others stands last and is cut so that the length is exact.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropkv.bench.tasks._base import Frame, Made, Question, Task
from dropkv.bench.tasks._match import match_part
from dropkv.errors import UsageError
from formats.errors import show_path

FILES = {
    "qa_1": ("SQuAD 2.0", "dev-v2.0.json", "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"),
    "qa_2": (
        "HotpotQA",
        "hotpot_dev_distractor_v1.json",
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
    ),
}
NAMES = tuple(FILES)
RULER_FILES = {"qa_1": "squad.json", "qa_2": "hotpotqa.json"}  # what RULER's download script calls them
INTRODUCTION = "Answer a question from the passages below. Give the answer alone, in a few words.\n\n"
QUESTION = (
    "\n\nAnswer the question from the passages above. Give the answer alone, in a few words.\n\nQuestion: {question}"
)


def make(name: str, *, data: str | None, essay: str | None) -> Task:
    source, file, address = FILES[name]
    if data is None:
        raise UsageError(f"{name}: needs {source}; download {address} and give its folder with --data")
    folder = Path(data).expanduser()
    for candidate in (file, RULER_FILES[name]):
        if (folder / candidate).is_file():
            return Passages(name, "RULER-shaped", 32, path=folder / candidate)
    raise UsageError(f"{name}: {show_path(folder)} holds no {file}; download it there: {address}")


@dataclass(frozen=True)
class Item:
    """A question; own: its passages. near: passages from the same article, taken before any others."""

    question: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    near: tuple[str, ...] = ()


@dataclass(frozen=True)
class Passages(Task):
    """path: the data set's file."""

    path: Path = Path()

    def score(self, prediction: str, question: Question) -> float:
        return match_part(prediction, question.answers)

    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        items, passages = _read(self.path, _squad if self.name == "qa_1" else _hotpot)
        random.Random(f"{self.name} {seed}").shuffle(items)
        introduction = frame.encode(INTRODUCTION)
        room = frame.room - len(introduction)
        made, least = 0, 0
        for item in items:
            draw = random.Random(f"{self.name} {seed} {item.question}")
            body = _mix(frame, draw, item, passages, room)
            if isinstance(body, int):
                least = min(least or body, body)
                continue
            question = Question(QUESTION.format(question=item.question), "Answer:", item.answers, self.max_new_tokens)
            yield Made(introduction + body, (question,))
            made += 1
        if not made:
            raise frame.short(len(introduction) + least)


def _mix(frame: Frame, draw: random.Random, item: Item, passages: list[str], room: int) -> list[int] | int:
    """The item's passages among others, `room` tokens; how many it needs when its own alone do not fit."""
    parts = [frame.encode(f"{text}\n\n") for text in item.own]
    titles = [frame.encode(f"Passage {place}:\n") for place in range(1, len(parts) + 1)]
    used = sum(map(len, parts + titles))
    if used > room:
        return used
    taken = {*item.own, *item.near}
    rest = (text for text in draw.sample(passages, len(passages)) if text not in taken)
    for text in itertools.chain(draw.sample(item.near, len(item.near)), rest):
        if used >= room:
            break
        parts.append(frame.encode(f"{text}\n\n"))
        titles.append(frame.encode(f"Passage {len(parts)}:\n"))
        used += len(parts[-1]) + len(titles[-1])
    if used < room:
        raise frame.long(used, "the file", "ask for a shorter one")
    # The last one added is the one that is too much: it stays last, to be cut.
    mixed = parts[:-1] if used > room else parts
    draw.shuffle(mixed)
    mixed += parts[len(mixed) :]
    return [token for title, part in zip(titles, mixed, strict=True) for token in title + part][:room]


def _read(path: Path, parse: Any) -> tuple[list[Item], list[str]]:
    """The questions of a file and all its passages, without repetition; raises UsageError for a file of another kind."""
    try:
        items: list[Item] = parse(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise UsageError(f"{show_path(path)}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{show_path(path)}: is not in the data set's own format; download it again, unchanged"
        ) from None
    if not items:
        raise UsageError(f"{show_path(path)}: holds no questions; download it again, unchanged")
    return items, sorted({text for item in items for text in (*item.own, *item.near)})


def _squad(data: Any) -> list[Item]:
    items = []
    for article in data["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            near = tuple(sorted({text for text in texts if text != own}))
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    items.append(Item(asked["question"], answers, (own,), near))
    return items


def _hotpot(data: Any) -> list[Item]:
    return [
        Item(item["question"], (item["answer"],), tuple(f"{title}\n{''.join(text)}" for title, text in item["context"]))
        for item in data
    ]
