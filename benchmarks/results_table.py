"""The tables of docs/results.md from the lines of a bench run: means over tasks, and paired differences to the first row.

    python benchmarks/results_table.py LINES --setting question-free [--length 2048] [--tasks noise,prose] [--methods full,kvzip]
        [--observers replay,none] [--first dropkv,replay] [--by-task 0.1] [--better]

LINES is a results folder or a file of pack_lines.py; both give the same table. The row given by --first (method,observer) comes before all, the
others by their mean. Intervals as in dropkv/bench/stats.py. --by-task BUDGET: one column per task at one budget in place of one per budget.
--better: in place of a table, the cells that are better than the first row beyond their 95 % interval, by task and budget.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from dropkv.bench.packed import unpack
from dropkv.bench.results import LINES, Line
from dropkv.bench.stats import Key, difference, estimate
from dropkv.errors import DropkvError
from dropkv_cli.bench.lines import read_json_lines

Row = tuple[str, str]  # method, observer
Scores = dict[Row, dict[float, dict[Key, float]]]  # by budget


def lines_of(place: Path) -> Iterable[Line]:
    """The lines of a folder or of a packed file. Raises DropkvError."""
    if not place.is_dir():
        return unpack(place)
    return read_json_lines(place / LINES)


def read(lines: Iterable[Line], given: argparse.Namespace) -> Scores:
    """The scores that the options choose, in an order of their own, so that a table does not depend on the order of lines."""
    chosen = {name: value.split(",") for name in ("tasks", "methods", "observers") if (value := getattr(given, name))}
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    found: list[tuple[Row, float, Key, float]] = []
    for line in lines:
        if line["setting"] != given.setting or (given.length and line["length"] != given.length):
            continue
        if any(line[name.removesuffix("s")] not in values for name, values in chosen.items()):
            continue
        key = line["task"], (line["length"], line["sample"]), line["question"]
        found.append(((line["method"], line["observer"]), float(line["budget"]), key, float(line["score"])))
    for row, budget, key, score in sorted(found):
        scores[row][budget][key] = score
    return scores


def show(own: Mapping[Key, float], first: Mapping[Key, float] | None) -> str:
    """A mean in percent, with its difference to the first row's, or the half width of its own interval."""
    mean = estimate(own)
    against = None if first is None else difference(own, first)
    if against is None:
        return f"{100 * mean.mean:.1f} ± {50 * (mean.high - mean.low):.1f}"
    return f"{100 * mean.mean:.1f} ({100 * against.mean:+.1f}, {100 * against.low:+.1f} to {100 * against.high:+.1f})"


def cell_of(row: Mapping[float, dict[Key, float]], budget: float) -> dict[Key, float]:
    """The scores of a row at a budget; what has no budget, such as the full cache, is the same at all of them."""
    return next(iter(row.values())) if len(row) == 1 else row.get(budget, {})


def budgets_of(scores: Scores) -> list[float]:
    return sorted({budget for row in scores.values() if len(row) > 1 for budget in row}) or [1.0]


def by_budget(scores: Scores, first: Row) -> None:
    budgets = budgets_of(scores)
    print("| method | " + " | ".join(f"{100 * budget:g} %" for budget in budgets) + " |")
    print("|---" * (len(budgets) + 1) + "|")
    for name in ordered(scores, first):
        row = scores[name]
        if len(row) == 1:
            cells = [""] * (len(budgets) - 1) + [show(cell_of(row, 1.0), None)]
        else:
            against = [None if name == first else cell_of(scores[first], budget) for budget in budgets]
            cells = [show(row[at], base) if at in row else "" for at, base in zip(budgets, against, strict=True)]
        print(f"| {label(name)} | " + " | ".join(cells) + " |")


def by_task(scores: Scores, first: Row, budget: float) -> None:
    tasks = sorted({key[0] for key in cell_of(scores[first], budget)})
    print("| method | " + " | ".join(tasks) + " |")
    print("|---" * (len(tasks) + 1) + "|")
    for name in ordered(scores, first):
        own = cell_of(scores[name], budget)
        parts = [{key: score for key, score in own.items() if key[0] == task} for task in tasks]
        print(f"| {label(name)} | " + " | ".join(f"{100 * estimate(p).mean:.1f}" if p else "" for p in parts) + " |")


def better(scores: Scores, first: Row) -> list[str]:
    """The cells that are better than the first row beyond their interval, a line for each task and budget."""
    lines = []
    for budget in budgets_of(scores):
        every = cell_of(scores[first], budget)
        for task in sorted({key[0] for key in every}):
            base = {key: score for key, score in every.items() if key[0] == task}
            found = []
            for name in ordered(scores, first):
                if name == first or len(scores[name]) == 1:
                    continue
                own = {key: score for key, score in scores[name].get(budget, {}).items() if key[0] == task}
                against = difference(own, base) if own else None
                if against is not None and against.low > 0:
                    found.append(f"{label(name)} {100 * against.mean:+.1f}")
            if found:
                head = f"* {task}, {100 * budget:g} % (first row {100 * estimate(base).mean:.1f})"
                lines.append(f"{head}: {', '.join(found)}")
    return lines or ["* none"]


def ordered(scores: Scores, first: Row) -> list[Row]:
    """The first row, then the controls without a budget, then the others by the mean of their budgets, best first."""

    def place(name: Row) -> tuple[bool, bool, float]:
        row = scores[name]
        return name != first, len(row) > 1, -sum(estimate(cell).mean for cell in row.values()) / len(row)

    return sorted(scores, key=place)


def label(name: Row) -> str:
    return {"full": "full cache"}.get(name[0], name[0]) if name[1] == "none" else f"{name[0]}, {name[1]}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("lines", type=Path, metavar="LINES")
    options.add_argument("--setting", default="question-free", choices=("question-free", "question-aware"))
    options.add_argument("--length", type=int)
    options.add_argument("--tasks")
    options.add_argument("--methods")
    options.add_argument("--observers")
    options.add_argument("--first", default="adadropkv,replay", help="method,observer the others are compared with")
    options.add_argument("--by-task", type=float, metavar="BUDGET")
    options.add_argument("--better", action="store_true")
    given = options.parse_args()
    try:
        scores = read(lines_of(given.lines), given)
    except DropkvError as error:
        options.exit(error.exit_code, f"{error}\n")
    method, _, observer = given.first.partition(",")
    first = (method, observer)
    if first not in scores:
        options.exit(1, f"no lines of {given.first} in {given.lines} that were chosen: name another --first\n")
    if given.better:
        print(*better(scores, first), sep="\n")
    elif given.by_task is not None:
        by_task(scores, first, given.by_task)
    else:
        by_budget(scores, first)


if __name__ == "__main__":
    main()
