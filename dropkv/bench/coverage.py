"""Which result lines belong to an accuracy plan, and which of them are still to be measured."""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.bench.cells import Cell, cells_of
from dropkv.bench.plan import AccuracyPlan, Setting
from dropkv.bench.results import KEY, Line, Results, key_of
from dropkv.bench.tasks import Sample, Task
from dropkv.bench.tasks import get as get_task
from dropkv.models import Model
from dropkv.prompts import Seam


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
                if not begun(model, task, length, setting, results):
                    return False
                samples = list(task.samples(model.tokenizer, length, plan.samples, plan.seed, len(seam.head_ids)))
                if lacking(model, plan, task, samples, setting, results, cells_of(plan, setting)):
                    return False
    return True


def begun(model: Model, task: Task, length: int, setting: Setting, results: Results) -> bool:
    """Whether there are lines of a task, length and setting."""
    place = [KEY.index(name) for name in ("model", "task", "length", "setting")]
    return any(tuple(key[at] for at in place) == (model.id, task.name, length, setting) for key in results.done)


def lacking(
    model: Model,
    plan: AccuracyPlan,
    task: Task,
    samples: Sequence[Sample],
    setting: Setting,
    results: Results,
    cells: Sequence[Cell],
) -> list[Cell]:
    """The cells of which a line is missing: a method that is added to a plan does not bring the others again."""
    return [
        cell
        for cell in cells
        if any(missing(plan, task, sample, setting, [cell], results, model) for sample in samples)
    ]


def line_of(
    plan: AccuracyPlan, task: Task, sample: Sample, setting: Setting, cell: Cell, question: int, model: Model
) -> Line:
    """The part of a result line that makes it the only one of its kind; question: its number in the sample."""
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


def missing(
    plan: AccuracyPlan,
    task: Task,
    sample: Sample,
    setting: Setting,
    cells: Sequence[Cell],
    results: Results,
    model: Model,
) -> bool:
    """Whether a line of a sample's cells is not among the results."""
    return any(
        key_of(line_of(plan, task, sample, setting, cell, number, model)) not in results.done
        for cell in cells
        for number in range(len(sample.questions))
    )
