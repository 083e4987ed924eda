"""Documents and questions of the accuracy bench, prefilled: once for all questions, or once for each that ends its document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dropkv.bench.answers import Row, answer_rows
from dropkv.bench.cells import Cell
from dropkv.bench.plan import AccuracyPlan, Setting
from dropkv.bench.survey import Survey, survey
from dropkv.bench.tasks import Question, Sample
from dropkv.models import Model
from dropkv.prompts import Seam

TOGETHER = 32_768  # tokens of documents that a GPU prefills together


@dataclass(frozen=True)
class Asked:
    """One prefilled document and a question to it: the tokens every answer begins with, and where they stand."""

    sample: Sample
    number: int
    survey: Survey
    tokens: tuple[int, ...]
    given: tuple[int, ...]  # what of the answer the prefill has already chosen
    over: bool = False  # the prefill has chosen to say nothing


def ask(
    model: Model, seam: Seam, plan: AccuracyPlan, samples: Sequence[Sample], setting: Setting, cells: Sequence[Cell]
) -> list[Asked]:
    """Prefill samples: once for all questions when they are not known, once for each when they are; equal lengths together."""
    head = len(seam.head_ids)
    wanted = [(cell.observer, cell.method) for cell in cells]
    readings = []  # what is prefilled, for which sample, and the questions that it serves
    for sample in samples:
        document = [*seam.head_ids, *sample.document_ids]
        tokens = [question_tokens(seam, question) for question in sample.questions]
        if setting == "question-free":
            readings.append((document, sample, list(enumerate(tokens))))
        else:
            readings.extend(([*document, *own], sample, [(number, own)]) for number, own in enumerate(tokens))
    surveys: dict[int, Survey] = {}
    firsts: dict[int, tuple[int, ...]] = {}
    lengths = [len(ids) for ids, _, _ in readings]
    for group in together(lengths, max(1, TOGETHER // max(lengths)) if model.device.type == "cuda" else 1):
        done = survey(
            model,
            seam,
            [readings[place][0] for place in group],
            wanted,
            head_tokens=head,
            chunk=plan.chunk,
            window=plan.window,
            seeds=[plan.seed + readings[place][1].index for place in group],
        )
        surveys.update(zip(group, done, strict=True))
        if setting == "question-aware":
            last = [readings[place][0][-1] for place in group]
            firsts.update(zip(group, _first_tokens(model, done, last), strict=True))
    asked = []
    for place, (ids, sample, questions) in enumerate(readings):
        for number, own in questions:
            if setting == "question-free":
                asked.append(Asked(sample, number, surveys[place], tuple(own), ()))
            else:
                first = firsts[place]
                asked.append(Asked(sample, number, surveys[place], first or (ids[-1],), first, over=not first))
    return asked


def together(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Places of equal lengths, in order, at most so many in a group."""
    by_length: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        by_length.setdefault(length, []).append(place)
    return [places[start : start + most] for places in by_length.values() for start in range(0, len(places), most)]


def _first_tokens(model: Model, surveys: Sequence[Survey], last: Sequence[int]) -> list[tuple[int, ...]]:
    """The first answer token comes from the full cache when the question was part of the prefill; empty for a stop token."""
    rows = []
    for number, (surveyed, token) in enumerate(zip(surveys, last, strict=True)):
        keep = surveyed.everything
        keep[..., -1] = False  # the last token is read again
        rows.append(Row(number, (token,), keep))
    keys, values = (
        [torch.stack([getattr(one, name)[layer] for one in surveys]) for layer in range(len(model.geometry))]
        for name in ("keys", "values")
    )
    starts = [surveyed.n - 1 for surveyed in surveys]
    return [tuple(tokens) for tokens in answer_rows(model, keys, values, rows, starts=starts, max_new_tokens=1)]


def question_tokens(seam: Seam, question: Question) -> list[int]:
    """What a question adds to the document: its text, the template's text after it, and how the answer begins."""
    after = seam.encoder.template(seam.pieces.after)
    return (
        seam.encoder.foreign(question.text)
        + after
        + (seam.encoder.foreign(question.answer_prefix) if question.answer_prefix else [])
    )
