"""Theory lines as plain-text tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "eps": "eps, the largest attention on an evicted key",
    "cone": "Cone constant c* of the evicted residuals",
    "approximate cone": "Cone constant of evicted residuals that hold a share of their mass, lower bounds",
    "mass": "Mass of the evicted keys inside a cone of constant c, lower bounds",
    "factor": "Factor of the bound, 1 / [c* (1 - eps) (1 - removed term)]",
    "gap": "Greedy against the exhaustive optimum, F(greedy) / F(best)",
    "angle": "Half-angle of the cone, arccos c*, in degrees",
    "residual": "||a - v|| of evicted and kept keys",
}
RUN = (
    "version kind table model document document_tokens question method window budget kept evicted seed "
    "paper_table paper_figure solver tolerance"
)
COMMON = frozenset(RUN.split())  # said above or below a table, not in its columns

Line = Mapping[str, Any]


def title_of(rows: Sequence[Line]) -> str:
    """A table's title, with what it is called in the paper."""
    kind = str(rows[0]["table"])
    found = {
        f"{what} {row[key]}": None
        for row in rows
        for what, key in (("table", "paper_table"), ("figure", "paper_figure"))
        if row.get(key)
    }
    return TITLES.get(kind, kind) + (f" (compare the paper's {' and '.join(found)})" if found else "")


def notes_of(rows: Sequence[Line]) -> str:
    """How a table's numbers were made, or nothing."""
    first = rows[0]
    return (
        f"{first['solver']}, bounds within {first['tolerance']:g}" if "solver" in first and "tolerance" in first else ""
    )


def columns_of(rows: Sequence[Line]) -> list[str]:
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


def render_theory(lines: Sequence[Line]) -> str:
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
        parts.append("\n".join([title_of(rows), *body, *filter(None, [notes_of(rows)])]))
    return "\n\n".join(parts) + "\n"
