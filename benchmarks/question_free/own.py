"""Self-study: what the model itself asks about each chunk of a document, and what it answers from that chunk.

Texts are written once and kept beside a study's lines (own.jsonl), a line for each document: they are the same for every recipe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import pad

from benchmarks.question_free.observers import Exchange, chunks_of
from dropkv.bench.answers import Row, answer_rows
from dropkv.bench.results import Line, Results, key_of
from dropkv.bench.survey import SLICE, Collector
from dropkv.models import Model
from dropkv.observers.tail import plan_tail
from dropkv.prefill import read
from dropkv.prompts import Seam

REQUEST = "Write three questions about this text."
QUESTIONS = 3  # of a chunk, at most
WRITTEN, ANSWERED = 96, 24  # tokens of all questions about a chunk, and of one answer, at most
NAME = "own.jsonl"
KEY = ("model", "task", "length", "seed", "sample")


class Notes:
    """The exchanges of documents, written when they are first asked for and kept in a folder."""

    def __init__(self, model: Model, seam: Seam, folder: str | Path) -> None:
        self.model, self.seam = model, seam
        self.results = Results(folder, NAME, KEY)
        self.known = {key_of(line, KEY): line for line in self.results.read()}

    def of(self, name: Line, document: Sequence[int]) -> list[list[Exchange]]:
        """The exchanges about each chunk of a document (ids, template head included); name: the values of KEY."""
        key = key_of(name, KEY)
        if key not in self.known:
            written = study(self.model, self.seam, document)
            chunks = [[[one.question, one.answer] for one in own] for own in written]
            line = dict(zip(KEY, key, strict=True)) | {"chunks": chunks}
            self.results.add([line])
            self.known[key] = line
        return [[Exchange(question, answer) for question, answer in own] for own in self.known[key]["chunks"]]


@dataclass(frozen=True)
class _Asked:
    """What is to be written behind one chunk."""

    chunk: int
    text: str


def study(model: Model, seam: Seam, document: Sequence[int]) -> list[list[Exchange]]:
    """What the model asks about each chunk that a replay repeats, read as a document of its own, and its answers; greedy."""
    head = len(seam.head_ids)
    chunks = [[*seam.head_ids, *document[start:stop]] for start, stop in chunks_of(len(document), head)]
    longest = max(map(len, chunks))
    parts: list[list[torch.Tensor]] = [[] for _ in range(2 * len(model.geometry))]
    for chunk in chunks:
        collector = Collector([], model.geometry)
        read(model, chunk, plan_tail(1, len(chunk)), collector, slice_tokens=SLICE)
        for own, x in zip(parts, [*collector.keys, *collector.values], strict=True):
            own.append(pad(x, (0, 0, 0, longest - len(chunk))))
    layers = [torch.stack(own) for own in parts]
    keys, values = layers[: len(model.geometry)], layers[len(model.geometry) :]
    kept = torch.zeros((len(chunks), len(keys), max(map(_heads, keys)), longest), dtype=torch.bool)
    for number, chunk in enumerate(chunks):
        kept[number, ..., : len(chunk)] = True

    def continued(asked: Sequence[_Asked], most: int) -> list[str]:
        # every chunk needs as many rows as the others
        each = max(sum(one.chunk == number for one in asked) for number in range(len(chunks)))
        rows, starts, places = [], [], []
        for number, chunk in enumerate(chunks):
            own = [place for place, one in enumerate(asked) if one.chunk == number]
            own += [own[0]] * (each - len(own))
            rows += [Row(number, tuple(seam.question_ids(asked[place].text)), kept[number]) for place in own]
            starts += [len(chunk)] * each
            places += own
        given = answer_rows(model, keys, values, rows, starts=starts, max_new_tokens=most)
        texts = dict(zip(places, given, strict=True))
        return [model.tokenizer.decode(texts[place], skip_special_tokens=True) for place in range(len(asked))]

    lists = continued([_Asked(number, REQUEST) for number in range(len(chunks))], WRITTEN)
    asked = [_Asked(number, question) for number, text in enumerate(lists) for question in questions_in(text)]
    answered = continued(asked, ANSWERED)
    exchanges: list[list[Exchange]] = [[] for _ in chunks]
    for one, answer in zip(asked, answered, strict=True):
        exchanges[one.chunk].append(Exchange(one.text, answer.strip()))
    return exchanges


def questions_in(text: str) -> list[str]:
    """The different questions of a list that the model wrote, without their numbers; where there is none, its first line, or the request."""
    lines = [re.sub(r"^\s*(\d+\s*[.):]|[-*])\s*", "", line).strip() for line in text.splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line))
    asked = [line for line in lines if line.endswith("?")]
    return asked[:QUESTIONS] or lines[:1] or [REQUEST]


def _heads(layer: torch.Tensor) -> int:
    return layer.shape[1]
