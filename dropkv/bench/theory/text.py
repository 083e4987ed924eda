"""Theory lines as plain-text tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "eps": "eps: the largest attention on an evicted key",
    "cone": "cone constant c of the evicted residuals, and of those that hold a share of their mass",
    "mass": "mass of the evicted keys inside a cone of constant c (lower bounds)",
    "factor": "factor of the bound, 1 / [c (1 - eps) (1 - removed term)]",
    "gap": "greedy against the exhaustive optimum, F(greedy) / F(best)",
    "angle": "half-angle of the cone, degrees",
    "residual": "||a - v|| of evicted and kept keys",
}
COMMON = frozenset(
    "version kind table model document document_tokens question method window budget kept evicted seed".split()
)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table's rows, in order of appearance, without what all tables share."""
    seen: dict[str, None] = {}
    for row in rows:
        seen.update(dict.fromkeys(key for key in row if key not in COMMON))
    return list(seen)


def show(value: Any) -> str:
    """A cell: numbers to four digits, nothing for what a row does not have."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(show(item) for item in value)
    return str(value)


def render_theory(lines: Sequence[Mapping[str, Any]]) -> str:
    """All theory lines of one run as text: what was measured, then a table per kind."""
    if not lines:
        return "no theory lines\n"
    first = lines[0]
    head = (
        f"{first['model']}, {first['document']}: {first['document_tokens']} tokens, {first['evicted']} evicted per KV head "
        f"by {first['method']} (budget {first['budget']}, window {first['window']}), seed {first['seed']}"
    )
    parts = [head]
    for table in dict.fromkeys(str(line["table"]) for line in lines):
        rows = [line for line in lines if line["table"] == table]
        columns = columns_of(rows)
        cells = [columns, *([show(row.get(column)) for column in columns] for row in rows)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
        body = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        parts.append("\n".join([TITLES.get(table, table), *body]))
    return "\n\n".join(parts) + "\n"
