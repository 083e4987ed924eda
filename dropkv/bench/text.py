"""Result lines as tables for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dropkv.bench.results import Line


def accuracy_tables(lines: Sequence[Line]) -> str:
    """One table for each setting, task and length: percent of the answers, methods down and budgets across."""
    cells: dict[tuple[str, str, int], dict[tuple[str, str], dict[float, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for line in lines:
        place = (line["setting"], line["task"], line["length"])
        cells[place][line["observer"], line["method"]][line["budget"]].append(line["score"])
    parts = []
    for (setting, task, length), rows in cells.items():
        budgets = sorted({budget for row in rows.values() for budget in row})
        head = f"{task}, {length} tokens, {setting}"
        table = [f"{'':28}" + "".join(f"{100 * budget:>8.0f} %" for budget in budgets) + f"{'n':>8}"]
        for (observer, method), row in rows.items():
            name = method if observer == "none" else f"{method} ({observer})"
            means = "".join(_mean(row.get(budget)) for budget in budgets)
            table.append(f"{name:28}{means}{max(map(len, row.values())):>8}")
        parts.append("\n".join([head, *table]))
    return "\n\n".join(parts)


def _mean(scores: list[float] | None) -> str:
    return f"{100 * sum(scores) / len(scores):>10.1f}" if scores else " " * 10
