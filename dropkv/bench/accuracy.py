"""Running an accuracy plan: one prefill per document serves every method, budget and question; answers come in batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dropkv.bench.answering import answer_samples
from dropkv.bench.cells import cells_of
from dropkv.bench.coverage import begun, lacking, missing
from dropkv.bench.plan import WITHOUT_BUDGET, AccuracyPlan, Setting
from dropkv.bench.results import Results
from dropkv.bench.speed.machine import machine
from dropkv.bench.tasks import Sample, Task
from dropkv.bench.tasks import get as get_task
from dropkv.budgets import counted_entries
from dropkv.devices import refuse_spread
from dropkv.errors import UsageError
from dropkv.models import Model
from dropkv.prompts import Seam

Note = Callable[[str], None]
Pace = Callable[[int], int]  # how many of the next so many documents to answer together; fewer than asked end the run
Progress = Callable[[int, int, int], None]  # documents measured by this run, found among the results, and of all


@dataclass
class Tally:
    """Documents of a run so far; a document counts once for each task, length and setting."""

    total: int
    told: Progress | None
    measured: int = 0
    found: int = 0

    def add(self, measured: int = 0, found: int = 0) -> None:
        """Count some more."""
        self.measured += measured
        self.found += found
        if self.told is not None:
            self.told(self.measured, self.found, self.total)


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
                        f"budget {cell.budget:g} of length {length} is {counted_entries(int(cell.budget * length))} and {cell.method} always keeps "
                        f"{forced}: use --lengths {math.ceil(forced / cell.budget)} or more, or larger --budgets"
                    )


def run_accuracy(
    model: Model,
    plan: AccuracyPlan,
    results: Results,
    note: Note,
    pace: Pace | None = None,
    progress: Progress | None = None,
) -> bool:
    """Measure every cell of the plan that the results do not hold yet; False when `pace` has ended the run before that.

    note is told about skipped tasks and those that are done; pace is asked before every batch, progress told after it.
    Raises UsageError for unknown names, for lengths beyond the model's context and for budgets that hold no more than what is always kept.
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
    with results.writing():
        tally = Tally(len(plan.tasks) * len(plan.lengths) * len(plan.settings) * plan.samples, progress)
        tally.add()
        return _run_tasks(model, seam, plan, results, note, pace, tally)


def _run_tasks(
    model: Model, seam: Seam, plan: AccuracyPlan, results: Results, note: Note, pace: Pace | None, tally: Tally
) -> bool:
    for name in plan.tasks:
        try:
            task = get_task(name, data=plan.data, essay=plan.essay)
        except UsageError as error:
            if "unknown task" in str(error):
                raise
            note(f"{name}: skipped, {error}")
            tally.add(found=len(plan.lengths) * len(plan.settings) * plan.samples)
            continue
        for length in plan.lengths:
            for setting in plan.settings:
                if not _run_task(model, seam, plan, task, length, setting, results, note, pace, tally):
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
    tally: Tally,
) -> bool:
    cells = cells_of(plan, setting)
    started = time.perf_counter()
    made = task.samples(model.tokenizer, length, plan.samples, plan.seed, head_tokens=len(seam.head_ids))
    samples: Iterable[Sample] = made  # each when its turn comes
    if begun(model, task, length, setting, results):
        samples = known = list(made)
        cells = lacking(model, plan, task, known, setting, results, cells)
    before, count, whole = tally.measured + tally.found, 0, True
    for group in _groups(samples, plan.batch):
        todo = [sample for sample in group if missing(plan, task, sample, setting, cells, results, model)]
        some = len(todo) if pace is None or not todo else pace(len(todo))
        whole = some == len(todo)
        todo = todo[:some]
        if whole:
            tally.add(found=len(group) - len(todo))
        if not todo and whole:
            continue
        if not todo:
            break
        results.add(answer_samples(model, seam, plan, task, todo, setting, cells))
        count += len(todo)
        tally.add(measured=len(todo))
        if not whole:
            break
    if whole:
        tally.add(found=before + plan.samples - tally.measured - tally.found)  # a task may have fewer documents
    if count:
        note(f"{task.name} {length} {setting}: {count} documents, {time.perf_counter() - started:.0f} s")
    return whole


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
