"""The speed sections: one per model, machine and versions, a table for each side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropkv.bench.report.html import Column, Value, table, text
from dropkv.bench.speed.text import NAMES, cells_of, heading, note_of

Line = Mapping[str, Any]


def section(run: Sequence[Line], anchor: str) -> str:
    """One run as HTML."""
    parts = []
    for side, name in NAMES.items():
        rows = [line for line in run if line.get("side") == side]
        if not rows:
            continue
        head, cells = cells_of(side, rows)
        columns = [Column(column, number=column != "what") for column in head]
        body = [[Value(cell, _sort(cell)) for cell in row] for row in cells]
        parts.append(f"<h4>{text(name)}</h4>{table(note_of(side, rows), columns, body, group=name)}")
    return f'<section class="group" id="{anchor}"><h3>{text(heading(run))}</h3>{"".join(parts)}</section>'


def _sort(cell: str) -> float | None:
    try:
        return float(cell.replace(",", "").removesuffix(" %"))
    except ValueError:
        return None
