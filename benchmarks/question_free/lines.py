"""What names a result of the study, and which of a document's are still to be measured."""

from __future__ import annotations

from collections.abc import Iterable

from dropkv.bench.results import Line, Results, key_of
from dropkv.bench.tasks import Sample, Task
from dropkv.models import Model

Cell = tuple[str, float]  # a row of the study, and its budget


def line_of(model: Model, task: Task, sample: Sample, seed: int, cell: Cell, question: int) -> Line:
    """The part of a line that makes it the only one of its kind; question: its number in the sample."""
    names = {"model": model.id, "task": task.name, "length": sample.length, "setting": "question-free"}
    own = {"observer": "replay", "method": cell[0], "budget": cell[1]}
    return names | own | {"seed": seed, "sample": sample.index, "question": question}


def missing(results: Results, model: Model, task: Task, sample: Sample, seed: int, cells: Iterable[Cell]) -> bool:
    """Whether a line of a document's questions is not among the results."""
    numbers = range(len(sample.questions))
    lines = (line_of(model, task, sample, seed, cell, number) for cell in cells for number in numbers)
    return any(key_of(line) not in results.done for line in lines)
