"""Answers of the accuracy bench: all cells, documents and questions of a batch at once, as masks over the full cache."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dropkv.bench.answers import Row, answer_rows
from dropkv.bench.asked import Asked, ask
from dropkv.bench.cells import Cell
from dropkv.bench.coverage import line_of
from dropkv.bench.kept import kept_sets, same_sets_of
from dropkv.bench.masked_run import ALIGNED, any_rows
from dropkv.bench.plan import AccuracyPlan, Setting
from dropkv.bench.results import Line
from dropkv.bench.tasks import Sample, Task
from dropkv.models import Model
from dropkv.prompts import Seam

ROW_TOKENS = {
    "cpu": 1_300_000,
    "cuda": 24_000_000,
}  # document tokens that all answers of a batch see together: bounds masks and logits
ROW_BYTES = 12 << 30  # of a batch's masks and of its answers' own keys and values, on a GPU


class Enough:
    """Whether an answer scores all there is already: nothing that follows can change that where a task's score only grows.

    Asked of every answer now and then, so one that lacks a token of the expected strings is not looked at closer.
    """

    def __init__(self, model: Model, task: Task, asked: Asked) -> None:
        self.tokenizer, self.task = model.tokenizer, task
        self.given, self.question, self.over = asked.given, asked.sample.questions[asked.number], asked.over
        encoded = (self.tokenizer.encode(answer, add_special_tokens=False) for answer in self.question.answers)
        self.needed = {token for ids in encoded for token in ids}

    def __call__(self, tokens: Sequence[int]) -> bool:
        if self.over:
            return True  # nothing of the answer counts
        mine = [*self.given, *tokens][: self.question.max_new_tokens]
        if not self.needed.issubset(mine):
            return False
        return self.task.score(self.tokenizer.decode(mine, skip_special_tokens=True), self.question) >= 1.0


def answer_samples(
    model: Model,
    seam: Seam,
    plan: AccuracyPlan,
    task: Task,
    samples: Sequence[Sample],
    setting: Setting,
    cells: Sequence[Cell],
) -> list[Line]:
    """All lines of some documents of one length."""
    started = time.perf_counter()
    asked = ask(model, seam, plan, samples, setting, cells)
    lines: list[Line] = []
    computed = [cell for cell in cells if cell.method != "random-answer"]
    seconds = (time.perf_counter() - started) / len(asked)
    room = ROW_TOKENS.get(model.device.type, ROW_TOKENS["cpu"])
    every = max(1, len(computed))
    per_batch = room // (every * max(one.survey.n for one in asked))
    if model.device.type == "cuda":
        per_batch = min(per_batch, ROW_BYTES // (every * max(map(partial(_row_bytes, model), asked))))
    per_batch = max(1, per_batch)
    for begin in range(0, len(asked) if computed else 0, per_batch):
        part = asked[begin : begin + per_batch]
        keeps = kept_sets([one.survey for one in part], computed, len(seam.head_ids))
        alike = same_sets_of(keeps)
        each = 0 if any_rows(model) else max(len(set(firsts)) for firsts in alike)
        longest = -(-max(one.survey.n for one in part) // ALIGNED) * ALIGNED
        keys = [
            torch.stack([_padded(one.survey.keys[layer], longest) for one in part])
            for layer in range(len(model.geometry))
        ]
        values = [
            torch.stack([_padded(one.survey.values[layer], longest) for one in part])
            for layer in range(len(model.geometry))
        ]
        rows: list[Row] = []  # cells that keep the same entries give the same answer: it is computed once
        starts: list[int] = []
        places: list[dict[int, int]] = []
        for place, (one, keep, firsts) in enumerate(zip(part, keeps, alike, strict=True)):
            padded = torch.nn.functional.pad(keep, (0, longest - one.survey.n))
            distinct = sorted(set(firsts))
            places.append({first: len(rows) + index for index, first in enumerate(distinct)})
            for first in [
                *distinct,
                *[0] * (each - len(distinct)),
            ]:  # every document may need as many rows as the others
                rows.append(Row(place, one.tokens, padded[first]))
                starts.append(one.survey.n)
        budget = max(one.sample.questions[one.number].max_new_tokens for one in part)
        enough = [Enough(model, task, one) for one in part]

        def decided(row: int, tokens: Sequence[int], rows: list[Row] = rows, enough: list[Enough] = enough) -> bool:
            return enough[rows[row].document](tokens)

        answers = answer_rows(
            model, keys, values, rows, starts=starts, max_new_tokens=budget, decided=decided if task.grows else None
        )
        for one, keep, firsts, rows_of in zip(part, keeps, alike, places, strict=True):
            question = one.sample.questions[one.number]
            counts = keep.flatten(1).sum(1).tolist()
            by_head = keep.sum(-1).tolist() if (one.sample.index, one.number) == (0, 0) else []
            for number, cell in enumerate(computed):
                answer = answers[rows_of[firsts[number]]]
                tokens = [*one.given, *answer][: 0 if one.over else question.max_new_tokens]
                prediction = model.tokenizer.decode(tokens, skip_special_tokens=True)
                line = line_of(plan, task, one.sample, setting, cell, one.number, model)
                kept, full = counts[number], keep[number].numel()
                line |= {
                    "score": task.score(prediction, question),
                    "prediction": prediction,
                    "answers": list(question.answers),
                    "kept_entries": kept,
                    "full_entries": full,
                    "kept_bytes": kept * (model.geometry[0].d_k + model.geometry[0].d_v) * model.dtype.itemsize,
                    "document_tokens": one.survey.n,
                    "seconds": round(seconds, 3),
                }
                if one.sample.depth is not None:
                    line["depth"] = one.sample.depth
                if one.sample.index == 0 and one.number == 0:
                    line["head_counts"] = by_head[number]
                lines.append(line)
    if any(cell.method == "random-answer" for cell in cells):
        lines.extend(_random_answers(model, plan, task, asked, setting))
    return lines


def _row_bytes(model: Model, asked: Asked) -> int:
    """What one answer's mask and its own keys and values take."""
    own = len(asked.tokens) + asked.sample.questions[asked.number].max_new_tokens
    entry = sum(layer.kv_heads * (layer.d_k + layer.d_v) for layer in model.geometry) * model.dtype.itemsize
    return asked.survey.n * sum(layer.kv_heads for layer in model.geometry) + own * entry


def _random_answers(
    model: Model, plan: AccuracyPlan, task: Task, asked: Sequence[Asked], setting: Setting
) -> list[Line]:
    """A control without a model: digits and letters drawn at random must score 0."""
    lines = []
    for one in asked:
        question = one.sample.questions[one.number]
        draw = random.Random(f"{plan.seed} {one.sample.task} {one.sample.index} {one.number}")
        prediction = " ".join("".join(draw.choice("0123456789abcdef") for _ in range(7)) for _ in range(4))
        line = line_of(plan, task, one.sample, setting, Cell("none", "random-answer", 1.0), one.number, model)
        line |= {"score": task.score(prediction, question), "prediction": prediction, "answers": list(question.answers)}
        lines.append(
            line
            | {"kept_entries": 0, "full_entries": 0, "kept_bytes": 0, "document_tokens": one.survey.n, "seconds": 0.0}
        )
    return lines


def _padded(x: Tensor, n: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[1]))
