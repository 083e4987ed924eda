"""Running an accuracy plan: one prefill per document serves every method, budget and question; answers come in batches."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dropkv.bench.answers import Row, answer_rows
from dropkv.bench.cells import Cell, cells_of
from dropkv.bench.kept import kept_sets, same_sets_of
from dropkv.bench.masked_run import ALIGNED, any_rows
from dropkv.bench.plan import WITHOUT_BUDGET, AccuracyPlan, Setting
from dropkv.bench.results import KEY, Line, Results, key_of
from dropkv.bench.speed.machine import machine
from dropkv.bench.survey import Survey, survey
from dropkv.bench.tasks import Question, Sample, Task
from dropkv.bench.tasks import get as get_task
from dropkv.devices import refuse_spread
from dropkv.errors import UsageError
from dropkv.models import Model
from dropkv.prompts import Seam

ROW_TOKENS = {
    "cpu": 1_300_000,
    "cuda": 24_000_000,
}  # document tokens that all answers of a batch see together: bounds masks and logits
ROW_BYTES = 12 << 30  # of a batch's masks and of its answers' own keys and values, on a GPU
TOGETHER = 32_768  # tokens of documents that a GPU prefills together

Note = Callable[[str], None]
Pace = Callable[[int], int]  # how many of the next so many documents to answer together; fewer than asked end the run


def lines_of(model: Model, plan: AccuracyPlan, results: Results) -> list[Line]:
    """The results that belong to a plan, whichever run measured them; a folder may hold others beside them."""
    cells = {
        (setting, cell.observer, cell.method, cell.budget)
        for setting in plan.settings
        for cell in cells_of(plan, setting)
    }
    return [
        line
        for line in results.read()
        if (line["model"], line["seed"]) == (model.id, plan.seed)
        and line["task"] in plan.tasks
        and line["length"] in plan.lengths
        and line["sample"] < plan.samples
        and (line["setting"], line["observer"], line["method"], line["budget"]) in cells
    ]


def may_be_measured(plan: AccuracyPlan, results: Results) -> bool:
    """Whether the results hold a line of any model for every cell and sample of a plan: cheap to tell, without a tokenizer."""
    place = [
        KEY.index(name) for name in ("task", "length", "setting", "observer", "method", "budget", "seed", "sample")
    ]
    found = {tuple(key[at] for at in place) for key in results.done}
    return all(
        (task, length, setting, cell.observer, cell.method, cell.budget, plan.seed, sample) in found
        for setting in plan.settings
        for cell in cells_of(plan, setting)
        for task in plan.tasks
        for length in plan.lengths
        for sample in range(plan.samples)
    )


def is_measured(model: Model, plan: AccuracyPlan, results: Results) -> bool:
    """Whether the results hold every line of a plan, so that a run would measure nothing. The model may lack its weights.

    Raises UsageError as `run_accuracy` does for the tasks.
    """
    seam = Seam.of(model.tokenizer, name=model.id)
    for name in plan.tasks:
        task = get_task(name, data=plan.data, essay=plan.essay)
        for length in plan.lengths:
            for setting in plan.settings:
                if _lacking(model, seam, plan, task, length, setting, results, cells_of(plan, setting)):
                    return False
    return True


def _lacking(
    model: Model,
    seam: Seam,
    plan: AccuracyPlan,
    task: Task,
    length: int,
    setting: Setting,
    results: Results,
    cells: Sequence[Cell],
) -> list[Cell]:
    """The cells of which a line is missing: a method that is added to a plan does not bring the others again."""
    place = [KEY.index(name) for name in ("model", "task", "length", "setting")]
    if not any(tuple(key[at] for at in place) == (model.id, task.name, length, setting) for key in results.done):
        return list(cells)
    samples = list(task.samples(model.tokenizer, length, plan.samples, plan.seed, len(seam.head_ids)))
    return [
        cell
        for cell in cells
        if any(_missing(plan, task, sample, setting, [cell], results, model) for sample in samples)
    ]


def check_budgets(plan: AccuracyPlan, head_tokens: int) -> None:
    """Raise UsageError when a method would keep more than a budget asks for: its forced entries alone are more."""
    from dropkv import methods

    for setting in plan.settings:
        for cell in cells_of(plan, setting):
            if cell.method in WITHOUT_BUDGET:
                continue
            method = methods.get(cell.method)
            if cell.observer == "replay":
                method = method.under_replay(head_tokens)
            for length in plan.lengths:
                forced = len(method.forced(length))
                if not method.keeps_all and int(cell.budget * length) < forced:
                    raise UsageError(
                        f"budget {cell.budget:g} of length {length} is {int(cell.budget * length)} entries and {cell.method} always keeps "
                        f"{forced}: use --lengths {math.ceil(forced / cell.budget)} or more, or larger --budgets"
                    )


def run_accuracy(model: Model, plan: AccuracyPlan, results: Results, note: Note, pace: Pace | None = None) -> bool:
    """Measure every cell of the plan that the results do not hold yet; False when `pace` has ended the run before that.

    note is told about skipped tasks and progress; pace is asked before every batch. Raises UsageError for unknown names, for lengths beyond the
    model's context and for budgets that hold no more than what is always kept.
    """
    plan.check_methods()
    refuse_spread(model)
    seam = Seam.of(model.tokenizer, name=model.id)
    check_budgets(plan, len(seam.head_ids))
    for length in plan.lengths:
        positions = model.regime(length).up_to
        if length > positions - 128:
            raise UsageError(
                f"length {length} leaves no room to answer: {model.id} has {positions} positions for it, "
                f"use --lengths {positions - 128} or less"
            )
    results.machine = machine(model)
    for name in plan.tasks:
        try:
            task = get_task(name, data=plan.data, essay=plan.essay)
        except UsageError as error:
            if "unknown task" in str(error):
                raise
            note(f"{name}: skipped, {error}")
            continue
        for length in plan.lengths:
            for setting in plan.settings:
                if not _run_task(model, seam, plan, task, length, setting, results, note, pace):
                    return False
    return True


def _run_task(
    model: Model,
    seam: Seam,
    plan: AccuracyPlan,
    task: Task,
    length: int,
    setting: Setting,
    results: Results,
    note: Note,
    pace: Pace | None,
) -> bool:
    cells = cells_of(plan, setting)
    started = time.perf_counter()
    cells = _lacking(model, seam, plan, task, length, setting, results, cells)
    samples = task.samples(model.tokenizer, length, plan.samples, plan.seed, head_tokens=len(seam.head_ids))
    count, whole = 0, True
    for group in _groups(samples, plan.batch):
        todo = [sample for sample in group if _missing(plan, task, sample, setting, cells, results, model)]
        some = len(todo) if pace is None or not todo else pace(len(todo))
        whole = some == len(todo)
        todo = todo[:some]
        if not todo and whole:
            continue
        if not todo:
            break
        results.add(_answer(model, seam, plan, task, todo, setting, cells))
        count += len(todo)
        if not whole:
            break
    if count:
        note(f"{task.name} {length} {setting}: {count} documents, {time.perf_counter() - started:.0f} s")
    return whole


def _groups(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _line(
    plan: AccuracyPlan, task: Task, sample: Sample, setting: Setting, cell: Cell, question: int, model: Model
) -> Line:
    return {
        "model": model.id,
        "task": task.name,
        "label": task.label,
        "length": sample.length,
        "setting": setting,
        "observer": cell.observer,
        "method": cell.method,
        "budget": cell.budget,
        "seed": plan.seed,
        "sample": sample.index,
        "question": question,
    }


def _missing(
    plan: AccuracyPlan,
    task: Task,
    sample: Sample,
    setting: Setting,
    cells: Sequence[Cell],
    results: Results,
    model: Model,
) -> bool:
    return any(
        key_of(_line(plan, task, sample, setting, cell, number, model)) not in results.done
        for cell in cells
        for number in range(len(sample.questions))
    )


@dataclass(frozen=True)
class Asked:
    """One prefilled document and a question to it: the tokens every answer begins with, and where they stand."""

    sample: Sample
    number: int
    survey: Survey
    tokens: tuple[int, ...]
    given: tuple[int, ...]  # what of the answer the prefill has already chosen
    over: bool = False  # the prefill has chosen to say nothing


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


def _answer(
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
    asked = _ask(model, seam, plan, samples, setting, cells)
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
                line = _line(plan, task, one.sample, setting, cell, one.number, model)
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
        line = _line(plan, task, one.sample, setting, Cell("none", "random-answer", 1.0), one.number, model)
        line |= {"score": task.score(prediction, question), "prediction": prediction, "answers": list(question.answers)}
        lines.append(
            line
            | {"kept_entries": 0, "full_entries": 0, "kept_bytes": 0, "document_tokens": one.survey.n, "seconds": 0.0}
        )
    return lines


def _ask(
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


def _padded(x: Tensor, n: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[1]))
