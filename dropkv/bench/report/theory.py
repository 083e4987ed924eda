"""The theory sections: one per run (model, document, budget, seed), a table per kind of line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropkv.bench.report.heat import bars
from dropkv.bench.report.html import Column, Value, table, text
from dropkv.bench.theory.text import columns_of, notes_of, show, title_of

Line = Mapping[str, Any]
RUN = ("model", "document", "question", "method", "budget", "seed")
NAMES = {
    "share_small": "share at most small",
    "share_positive": "share with c > 0",
    "median_positive": "median where c > 0",
    "share_above_95": "share with mass 0.95 or more",
    "share_optimal": "share where greedy is best",
    "no_cone": "triples without a cone",
}


def runs(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each run, in order of appearance."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(repr(line.get(key)) for key in RUN), []).append(line)
    return list(found.values())


def heading(run: Sequence[Line]) -> str:
    """A run's name."""
    first = run[0]
    return f"{first.get('model')}, {first.get('document')}, budget {first.get('budget')}"


def section(run: Sequence[Line], anchor: str) -> str:
    """One run as HTML."""
    parts = []
    for kind in dict.fromkeys(str(line["table"]) for line in run):
        rows = [line for line in run if str(line["table"]) == kind]
        names = columns_of(rows)
        columns = [
            Column(NAMES.get(name, name.replace("_", " ")), number=_numbers(rows, name))
            for name in names
            if name != "counts"
        ]
        body = [[_value(row.get(name)) for name in names if name != "counts"] for row in rows]
        title = title_of(rows)
        caption = "; ".join(filter(None, [describe(rows), notes_of(rows)]))
        picture = "".join(_histogram(row) for row in rows) if kind == "angle" else ""
        parts.append(f"<h4>{text(title)}</h4>{picture}{table(caption, columns, body, group=title)}")
    return f'<section class="group" id="{anchor}"><h3>{text(heading(run))}</h3>{"".join(parts)}</section>'


def describe(rows: Sequence[Line]) -> str:
    """Setting, model, samples and seed of a table."""
    first = rows[0]
    setting = "question-aware" if first.get("question") else "question-free"
    triples = " and ".join(dict.fromkeys(str(row.get("triples")) for row in rows))
    return (
        f"{setting}, window of the last {first.get('window')} tokens; {first.get('model')}; {first.get('document')} "
        f"({first.get('document_tokens')} tokens), {first.get('evicted')} evicted per KV head by {first.get('method')}; "
        f"{triples} (layer, head, query) triples; seed {first.get('seed')}"
    )


def _numbers(rows: Sequence[Line], name: str) -> bool:
    return all(row.get(name) is None or isinstance(row.get(name), int | float) for row in rows)


def _value(value: Any) -> Value:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    return Value("\N{EN DASH}" if value is None else show(value), number)


def _histogram(row: Line) -> str:
    counts = row.get("counts")
    if not isinstance(counts, list) or not counts or not all(isinstance(count, int) for count in counts):
        return ""
    step = 90 / len(counts)
    names = [f"{index * step:.3g}\N{DEGREE SIGN}" for index in range(len(counts))]
    title = f"Half-angles of the cones: {sum(counts)} triples with one, {row.get('no_cone')} without"
    return f"<figure><figcaption>{text(title)}</figcaption>{bars(title, names, counts, 'half-angle arccos c, degrees')}</figure>"
