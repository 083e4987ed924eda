"""Tables of docs/question-free.md: every recipe's share of the full cache, with paired differences to one of them.

    python -m benchmarks.question_free.shares LINES [--tasks noise,prose] [--lengths 1536] [--budgets 0.05,0.1]
        [--recipes "kvzip;two 0.27, 30 % by step/sum=auto-twice;*"] [--against default] [--points] [--by-task] [--targets 0.65,0.85,0.97] [--better]

LINES is a file of benchmarks/question_free/packed.py. --recipes chooses and, behind =, names anew; * are all others, and names beside it
need not be there. Rows come in the order of their mean over the budgets.

A share is the mean of the tasks' means over that of the full cache on the same questions. In brackets stands the difference to the row --against
and its 95 % interval (dropkv/bench/stats.py), as a part of the full cache's score; with --against full the interval of the share itself. The full
cache's score counts as known there. --points: scores in percent and differences in points in place of shares. What is paired and resampled is a
document: a sample of a seed, with all its questions; documents of the task written are the same whatever the seed and count once. Tasks of
several lengths are tasks of their own.

--by-task: rows for every task. --targets: a row of what each budget has to reach. --better: in place of a table the cells that are better than the
row --against beyond their interval, in points.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.question_free.packed import content_of, unpack
from benchmarks.question_free.table import FULL, document_of
from benchmarks.question_free.written import NAME as WRITTEN
from benchmarks.results_table import better
from dropkv.bench.packed import WHERE
from dropkv.bench.results import Line
from dropkv.bench.stats import Estimate, Key, difference, estimate
from dropkv.errors import DropkvError, ResultsError, UsageError

EVERY = "*"
Cells = dict[float, dict[Key, float]]  # by budget


@dataclass(frozen=True)
class Study:
    """Scores by shown name and budget, those of the full cache apart; the seeds that made documents (none made those of written)."""

    full: dict[Key, float]
    rows: dict[str, Cells]
    seeds: list[int]

    @property
    def budgets(self) -> list[float]:
        return sorted({budget for cells in self.rows.values() for budget in cells})

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(key[0] for key in self.full))

    def of(self, task: str) -> Study:
        """The part of one task."""
        rows = {
            name: {budget: only(own, task) for budget, own in cells.items() if only(own, task)}
            for name, cells in self.rows.items()
        }
        return Study(only(self.full, task), {name: cells for name, cells in rows.items() if cells}, self.seeds)

    def share(self, own: Mapping[Key, float]) -> float:
        """A cell's mean over the full cache's on the same questions."""
        return estimate(own).mean / max(1e-9, self.whole(own))

    def whole(self, own: Mapping[Key, float]) -> float:
        return estimate({key: self.full[key] for key in own}).mean

    def order(self) -> list[tuple[float, str]]:
        """Mean share and name of every row, best first."""
        means = [
            (sum(self.share(own) for own in cells.values()) / len(cells), name) for name, cells in self.rows.items()
        ]
        return sorted(means, key=lambda one: (-one[0], one[1]))


def only(scores: Mapping[Key, float], task: str) -> dict[Key, float]:
    return {key: score for key, score in scores.items() if key[0] == task}


def names_of(recipes: str) -> dict[str, str]:
    """The shown name of each chosen recipe; EVERY for all others."""
    parts = [part.strip().partition("=") for part in recipes.split(";") if part.strip()]
    return {recipe: shown or recipe for recipe, _, shown in parts}


def study_of(lines: Iterable[Line], tasks: Sequence[str], lengths: Sequence[int], names: Mapping[str, str]) -> Study:
    """What the options choose; the same study in whatever order lines come. Raises UsageError for what is not there."""
    chosen = [
        line for line in lines if (not tasks or line["task"] in tasks) and (not lengths or line["length"] in lengths)
    ]
    if lacking := [task for task in tasks if task not in {line["task"] for line in chosen}]:
        raise UsageError(f"no lines of the task {lacking[0]}: name other --tasks or --lengths")
    known = {line["method"] for line in chosen}
    if EVERY not in names and (lacking := [name for name in names if name not in known]):
        raise UsageError(f"no lines of the recipe {lacking[0]!r}: name other --recipes")
    if FULL not in known:
        raise ResultsError("no lines of the full cache: shares are shares of it")
    several = len({line["length"] for line in chosen}) > 1
    places = {task: place for place, task in enumerate(tasks)}
    full: dict[Key, float] = {}
    rows: dict[str, Cells] = defaultdict(lambda: defaultdict(dict))
    for line in sorted(chosen, key=lambda one: (places.get(one["task"], 0), *(one[name] for name in ORDER))):
        task, method = line["task"], line["method"]
        key = (f"{task} at {line['length']:,}" if several else task), document_of(line), line["question"]
        if method == FULL:
            full.setdefault(key, line["score"])
        elif method in names or EVERY in names:
            rows[names.get(method, method)][line["budget"]].setdefault(key, line["score"])
    seeds = sorted({line["seed"] for line in chosen if line["task"] != WRITTEN})
    return Study(full, {name: dict(cells) for name, cells in rows.items()}, seeds)


ORDER = ("task", "length", "seed", "sample", "question", "method", "budget")


def cell(study: Study, own: Mapping[Key, float], base: Mapping[Key, float] | None, points: bool) -> str:
    """A share, or a score in percent, with the difference to base; base None: the share's own interval."""
    scale, signed = (100.0, "+z.1f") if points else (1 / max(1e-9, study.whole(own)), "+z.2f")
    mean = f"{100 * estimate(own).mean:.1f}" if points else f"{study.share(own):.3f}"
    if base is None:
        against = difference(own, study.full)
        if points or against is None:
            spread = estimate(own)
            return f"{mean} ({100 * spread.low:.1f} to {100 * spread.high:.1f})" if points else mean
        return f"{mean} ({1 + scale * against.low:.2f} to {1 + scale * against.high:.2f})"
    against = difference(own, base) if base is not own else None
    if against is None:
        return mean
    bracket = [format(scale * value, signed) for value in (against.mean, against.low, against.high)]
    return f"{mean} ({bracket[0]}, {bracket[1]} to {bracket[2]})"


def table(study: Study, against: str, points: bool, label: Callable[[str], str]) -> list[str]:
    """The rows of a study; label makes the first cells of a row from its name."""
    made = []
    for mean, name in study.order():
        cells = []
        for budget in study.budgets:
            own = study.rows[name].get(budget)
            base = None if against == FULL else study.rows.get(against, {}).get(budget, {})
            cells.append(cell(study, own, base, points) if own else "")
        if points:
            means = [100 * estimate(own).mean for own in study.rows[name].values()]
            shown = f"{sum(means) / len(means):.1f}"
        else:
            shown = f"{mean:.3f}"
        most = max(documents(own) for own in study.rows[name].values())
        few = "" if most == documents(study.full) else f" (of {most} documents)"
        made.append(f"| {label(name)}{few} | {shown} | {' | '.join(cells)} |")
    return made


def documents(scores: Mapping[Key, float]) -> int:
    return estimate(scores).samples


def below(study: Study, content: Mapping[str, str]) -> list[str]:
    """What stands below a table: the full cache, the documents, and where and when it was measured."""

    def percent(of: Estimate) -> str:
        return f"{100 * of.mean:.1f} % ({100 * of.low:.1f} to {100 * of.high:.1f})"

    parts = {task: estimate(study.of(task).full) for task in study.tasks}
    each = ", ".join(f"{task} {percent(own)}" for task, own in parts.items())
    counts = ", ".join(
        f"{own.samples:,} of {task}" + (f" with {own.questions:,} questions" if own.questions != own.samples else "")
        for task, own in parts.items()
    )
    full = f"* Full cache: {percent(estimate(study.full))}: {each}." if len(parts) > 1 else f"* Full cache: {each}."
    seeds = f"seed{'s' if len(study.seeds) > 1 else ''} {', '.join(map(str, study.seeds))}; " if study.seeds else ""
    return [full, f"* Documents: {counts}; {seeds}{content['model']}, {', '.join(content[name] for name in WHERE)}."]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("lines", type=Path, metavar="LINES")
    options.add_argument("--tasks", default="")
    options.add_argument("--lengths", default="")
    options.add_argument("--budgets", default="")
    options.add_argument("--recipes", default=EVERY)
    options.add_argument("--against", default="default", help="a shown name, or full")
    options.add_argument("--points", action="store_true")
    options.add_argument("--by-task", action="store_true")
    options.add_argument("--targets", default="")
    options.add_argument("--better", action="store_true")
    given = options.parse_args()
    try:
        content = content_of(given.lines)
        tasks = [task for task in given.tasks.split(",") if task]
        lengths = [int(length) for length in given.lengths.split(",") if length]
        budgets = [float(budget) for budget in given.budgets.split(",") if budget]
        lines = (line for line in unpack(content) if not budgets or line["budget"] in budgets or line["method"] == FULL)
        study = study_of(lines, tasks, lengths, names_of(given.recipes))
        if given.against != FULL and given.against not in study.rows:
            raise UsageError(f"no row {given.against!r} that was chosen: name another --against")
        targets = [float(target) for target in given.targets.split(",") if target]
        if targets and len(targets) != len(study.budgets):
            raise UsageError(f"--targets: one for each of the {len(study.budgets)} budgets")
    except DropkvError as error:
        options.exit(error.exit_code, f"{error}\n")
    if given.better:
        everything = {(name, "none"): cells for name, cells in study.rows.items()}
        print(*better(everything | {(FULL, "none"): {1.0: study.full}}, (given.against, "none")), sep="\n")
        return
    shown = [f"{100 * budget:g} %" for budget in study.budgets]
    first = ["task", "recipe"] if given.by_task else ["recipe"]
    print(f"| {' | '.join([*first, 'mean', *shown])} |")
    print("|---" * (len(shown) + len(first) + 1) + "|")
    if targets:
        cells = [f"{target:.2f}" for target in targets]
        print(f"| {' | '.join(['to reach', *[''] * len(first), *cells])} |")
    if given.by_task:
        for task in study.tasks:
            print(
                *table(study.of(task), given.against, given.points, lambda name, task=task: f"{task} | {name}"),
                sep="\n",
            )  # type: ignore[misc]
    else:
        print(*table(study, given.against, given.points, lambda name: name), sep="\n")
    print(*below(study, content), sep="\n")


if __name__ == "__main__":
    main()
