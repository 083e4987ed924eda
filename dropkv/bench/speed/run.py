"""Running a speed plan: every cell that a folder lacks, each length and batch size beside transformers in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dropkv import methods
from dropkv.bench.results import Line, Results, key_of
from dropkv.bench.speed import compressed, layer, plain
from dropkv.bench.speed.compressed import Cell
from dropkv.bench.speed.machine import Figures, clean, machine, measured, no_memory
from dropkv.bench.speed.material import Material, check_fit, observers_of
from dropkv.bench.speed.plan import KEY, LINES, Side, SpeedPlan
from dropkv.bench.speed.text import PLAIN, number, shown_cell
from dropkv.budgets import kept_count
from dropkv.devices import refuse_spread
from dropkv.models import Model
from dropkv.prefill import Prefilled

WARMING = 4096  # document tokens
COMPARED = ("seconds", "first_token_seconds", "step_seconds", "total_seconds", "peak_memory_bytes")

Note = Callable[[str], None]


def open_results(folder: str | Path) -> Results:
    """The folder's lines of speed. Raises ResultsError."""
    return Results(folder, LINES, KEY)


@dataclass(frozen=True)
class Group:
    """What is compared with one run of transformers: a length on one side, and a batch size there. about: what all its lines say."""

    side: Side
    length: int
    batch_size: int | None
    about: Line
    cells: tuple[Cell, ...]

    def line(self, cell: Cell | None) -> Line:
        """A cell's line without figures; None is transformers."""
        own = (PLAIN, "none", 1.0) if cell is None else (cell.method, cell.observer, cell.budget)
        return self.about | dict(zip(("method", "observer", "budget"), own, strict=True))


def groups_of(model: Model, plan: SpeedPlan) -> Iterator[Group]:
    """Everything that a plan measures on this machine."""
    about = {"kind": "speed", "model": model.id, "random_weights": model.tokenizer is None, "repeat": plan.repeat}
    about |= machine(model)
    for length in plan.lengths:
        for side in plan.sides:
            cells = []
            for method, budget in plan.cells:
                observers = observers_of(plan, methods.get(method))
                # A file is as fast whatever observed it: the first observer's stands for all.
                cells += [
                    Cell(method, observer, budget, length)
                    for observer in (observers if side == "compress" else observers[:1])
                ]
            if side == "compress":
                own = {"batch_size": None, "chunk": plan.chunk, "window": plan.window}
                yield Group(side, length, None, about | {"side": side, "length": length} | own, tuple(cells))
                continue
            for size in plan.batch_sizes:
                own = {
                    "batch_size": size,
                    "question_tokens": plan.question_tokens,
                    "answer_tokens": plan.answer_tokens,
                }
                yield Group(side, length, size, about | {"side": side, "length": length} | own, tuple(cells))


def run_speed(model: Model, plan: SpeedPlan, results: Results, note: Note = lambda text: None) -> None:
    """Measure every cell of the plan that the results do not hold for this machine and these versions; each line is on disk when it is done.

    Where cells are missing transformers is measured again, so that every ratio is one of a single run. A cell that runs out of memory has a
    line that says so. Raises UsageError for what does not fit the model, before anything is measured.
    """
    refuse_spread(model)
    material = Material.of(model, max(plan.lengths))
    check_fit(model, plan, material)
    with TemporaryDirectory(prefix="dropkv-bench-") as folder, results.writing():
        bench = _Bench(model, plan, material, Path(folder))
        for group in groups_of(model, plan):
            missing = [
                cell for cell in (None, *group.cells) if key_of(group.line(cell), KEY) not in results.done
            ]  # fmt: skip
            if not missing:
                continue
            reference = bench.run(group, None)
            for cell in missing:
                found = reference if cell is None else bench.run(group, cell)
                line = group.line(cell) | _outcome(found, None if cell is None else reference)
                results.add([line])
                note(_said(line))


def lines_of(model: Model, plan: SpeedPlan, results: Results) -> list[Line]:
    """The results that belong to a plan on this machine, in the plan's order."""
    found = {key_of(line, KEY): line for line in results.read()}
    keys = [key_of(group.line(cell), KEY) for group in groups_of(model, plan) for cell in (None, *group.cells)]
    return [found[key] for key in keys if key in found]


class _Bench:
    """One model and what is read; files of compressed documents are made when they are first asked."""

    def __init__(self, model: Model, plan: SpeedPlan, material: Material, folder: Path) -> None:
        self.model, self.plan, self.material, self.folder = model, plan, material, folder
        self.files: dict[Cell, Path | None] = {}

    def run(self, group: Group, cell: Cell | None) -> Figures | None:
        """A cell's figures, transformers' for None; None when memory runs out."""
        if cell is None:
            return measured(self.model, *self._plain(group))
        action = self._action(group, cell)
        if action is None:
            return None
        found = measured(self.model, action, self.plan.repeat)
        if found is None or cell is None or group.batch_size is not None:
            return found
        return found | (self._layer(cell) or {})

    def _layer(self, cell: Cell) -> Figures | None:
        """Figures of one layer of a cell, where a layer alone has any."""
        model, plan, n = self.model, self.plan, cell.length
        method = methods.get(cell.method)
        if not layer.has_layer(method, cell.observer):
            return None
        kept = kept_count(cell.budget, n, len(method.forced(n)))
        action = partial(layer.score_layer, model, method, n, plan.window, kept)
        found = measured(model, action, plan.repeat)
        return None if found is None else {name: value for name, value in found.items() if name.startswith("layer_")}

    def _plain(self, group: Group) -> tuple[Callable[[], Figures], int, Callable[[], Figures]]:
        """transformers' action and how often; its kernels are the same for any length, so that a short document warms up."""
        model, plan, ids = self.model, self.plan, self.material.ids[: group.length]
        if group.batch_size is None:
            read = partial(plain.read_plainly, model)
            return partial(read, ids), plan.repeat, partial(read, ids[:WARMING])
        questions = self.material.questions(group.batch_size, plan.question_tokens)
        answer = partial(plain.answer_plainly, model)
        return (
            partial(answer, ids, questions, plan.answer_tokens),
            plan.repeat,
            partial(answer, ids[:WARMING], questions, 3),
        )

    def _action(self, group: Group, cell: Cell) -> Callable[[], Figures] | None:
        if group.batch_size is None:
            return partial(self._compress, cell)
        path = self._file(cell)
        questions = self.material.questions(group.batch_size, self.plan.question_tokens)
        return (
            None if path is None else partial(compressed.answer, self.model, path, questions, self.plan.answer_tokens)
        )

    def _compress(self, cell: Cell) -> Figures:
        """The first run, which warms up, leaves the file that will be asked."""
        method, done, figures = compressed.compress(self.model, self.plan, self.material, cell)
        observer = observers_of(self.plan, methods.get(cell.method))[0]
        if "answer" in self.plan.sides and cell.observer == observer and cell not in self.files:
            self._keep(cell, method, done)
        return figures

    def _keep(self, cell: Cell, method: methods.Method, done: Prefilled) -> None:
        """Write a file. Those of other lengths are no longer needed."""
        for other in [other for other in self.files if other.length != cell.length]:
            made = self.files.pop(other)
            if made is not None:
                made.unlink()
        path = self.folder / f"{len(self.files)}-{cell.length}.kv"
        compressed.write(self.model, cell, method, done, path)
        self.files[cell] = path

    def _file(self, cell: Cell) -> Path | None:
        """A document's file, None where it cannot be made in this memory."""
        if cell not in self.files:
            clean(self.model)
            try:
                self._keep(cell, *compressed.compress(self.model, self.plan, self.material, cell)[:2])
            except Exception as error:
                if not no_memory(error):
                    raise
                self.files[cell] = None
        return self.files[cell]


def _outcome(found: Figures | None, reference: Figures | None) -> dict[str, Any]:
    """What a line says of its figures. ratios: to transformers in the same run, none for itself and where one of both lacked memory."""
    if found is None:
        return {"outcome": "out of memory", "ratios": {}, "transformers_figures": reference}
    ratios = {}
    if reference is not None:
        ratios = {name: found[name] / reference[name] for name in COMPARED if reference.get(name) and name in found}
    return {"outcome": "measured", **found, "ratios": ratios, "transformers_figures": reference}


def _said(line: Line) -> str:
    """One line while a run goes on."""
    batch = "" if line["batch_size"] is None else f", {line['batch_size']} at once"
    start = f"{line['side']}, {line['length']:,} tokens{batch}, {shown_cell(line)}"
    if line["outcome"] != "measured":
        return f"{start}: {line['outcome']}"
    return f"{start}: {number(line['seconds' if line['side'] == 'compress' else 'total_seconds'])} s"
