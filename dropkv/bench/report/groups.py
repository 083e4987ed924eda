"""Results in the order they are shown: settings apart, then one group per model, label and length, then cells of method and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dropkv.bench.report.lines import Result
from dropkv.bench.stats import Estimate, Key, difference, estimate

CONTROLS = ("full", "random", "no-document", "random-answer")
FLAT = ("full", "no-document", "random-answer")  # have no budget: drawn as lines across a plot
UNOBSERVED = "none"  # the observer of methods that need no queries
QUESTION_FREE = "question-free"


@dataclass
class Cell:
    """One method at one budget in a group."""

    method: str
    observer: str
    budget: float
    results: dict[Key, Result] = field(default_factory=dict)

    @property
    def series(self) -> tuple[str, str]:
        """What is drawn as one line: method and observer; controls without a budget have no observer."""
        return (self.method, "" if self.method in FLAT else self.observer)

    @property
    def scores(self) -> dict[Key, float]:
        """Scores by question."""
        return {key: result.score for key, result in self.results.items()}

    def of_task(self, task: str) -> dict[Key, float]:
        """Scores of one task."""
        return {key: result.score for key, result in self.results.items() if result.task == task}

    def per_document(self) -> list[Result]:
        """One result of each document: what does not differ between its questions."""
        return list({(key[0], key[1]): result for key, result in self.results.items()}.values())

    @property
    def kept_bytes(self) -> float:
        """Mean bytes of a kept document."""
        documents = self.per_document()
        return sum(result.kept_bytes for result in documents) / len(documents)

    @property
    def kept_share(self) -> float | None:
        """Kept entries of all entries."""
        documents = self.per_document()
        full = sum(result.full_entries for result in documents)
        return sum(result.kept_entries for result in documents) / full if full else None


Rows = Sequence[tuple[Cell, Estimate, Estimate | None]]  # a cell, its mean, the difference to the first method's


@dataclass
class Group:
    """Results that may stand in one table: same setting, model, label and length (all lengths, for a depth grid)."""

    setting: str
    model: str
    label: str
    lengths: tuple[int, ...]
    cells: list[Cell]
    grid: bool

    @cached_property
    def tasks(self) -> list[str]:
        """Tasks in order of appearance."""
        return list(dict.fromkeys(result.task for cell in self.cells for result in cell.results.values()))

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds of the samples, ascending."""
        return sorted({result.seed for cell in self.cells for result in cell.results.values()})

    @cached_property
    def observers(self) -> list[str]:
        """Observers of the methods that have one, in order of appearance."""
        return list(dict.fromkeys(cell.observer for cell in self.cells if cell.observer != UNOBSERVED))

    @cached_property
    def samples(self) -> list[int]:
        """The smallest and the largest number of documents that a task has in a cell."""
        counts = set()
        for cell in self.cells:
            documents = cell.per_document()
            counts |= {sum(result.task == task for result in documents) for task in {r.task for r in documents}}
        return sorted({min(counts), max(counts)})

    @cached_property
    def series(self) -> list[tuple[str, str]]:
        """Methods (with observers), in order of appearance."""
        return list(dict.fromkeys(cell.series for cell in self.cells))

    def name(self, series: tuple[str, str]) -> str:
        """A series' name: the observer only where there are several."""
        method, observer = series
        return f"{method}, {observer}" if observer not in ("", UNOBSERVED) and len(self.observers) > 1 else method

    def first(self) -> tuple[str, str] | None:
        """The series that others are compared with: the first one that is no control, else the first."""
        return next((series for series in self.series if series[0] not in CONTROLS), next(iter(self.series), None))

    def ranked(self, rows: Rows) -> list[tuple[str, str]]:
        """Series as they are shown: the first one, the others by the mean of their budgets, controls without a budget last."""
        means: dict[tuple[str, str], list[float]] = {}
        for cell, found, _ in rows:
            means.setdefault(cell.series, []).append(found.mean)

        def place(series: tuple[str, str]) -> tuple[bool, bool, float]:
            return series != self.first(), series[0] in FLAT, -sum(means[series]) / len(means[series])

        return sorted(self.series, key=place)

    def estimates(self) -> Rows:
        """Per cell its mean, and the paired difference to the first method at the same budget."""
        first = self.first()
        base = {cell.budget: cell for cell in self.cells if cell.series == first}
        rows: list[tuple[Cell, Estimate, Estimate | None]] = []
        for cell in self.cells:
            other = base.get(cell.budget)
            compared = None if other is None or other is cell else difference(cell.scores, other.scores)
            rows.append((cell, estimate(cell.scores), compared))
        return rows


def group(results: Sequence[Result]) -> list[Group]:
    """All groups, question-free ones first. Of two results for the same question the later one counts."""
    depths: dict[tuple[str, str, str], bool] = {}
    for result in results:
        place = (result.setting, result.model, result.label)
        depths[place] = depths.get(place, True) and result.depth is not None
    groups: dict[tuple[str, str, str, int], tuple[Group, dict[tuple[str, str, float], Cell]]] = {}
    for result in results:
        grid = depths[result.setting, result.model, result.label]
        place_of = (result.setting, result.model, result.label, 0 if grid else result.length)
        if place_of not in groups:
            groups[place_of] = (Group(result.setting, result.model, result.label, (), [], grid), {})
        made, cells = groups[place_of]
        flat = result.method in FLAT
        cell_key = (result.method, "" if flat else result.observer, 0.0 if flat else result.budget)
        if cell_key not in cells:
            cells[cell_key] = Cell(result.method, result.observer, result.budget)
            made.cells.append(cells[cell_key])
        if result.length not in made.lengths:
            made.lengths = tuple(sorted((*made.lengths, result.length)))
        # A grid's lengths weigh alike, as tasks do; elsewhere a group has one length.
        stratum = f"{result.task} {result.length}" if grid else result.task
        cells[cell_key].results[stratum, (result.seed, result.sample), result.question] = result
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != QUESTION_FREE, item[0][1], item[0][2], item[0][3]))
    return [made for _, (made, _) in ordered]
