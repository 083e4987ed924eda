"""Lines of speed as tables, for a terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = "transformers"
NO_MEMORY = "out of memory"
DASH = "-"

Line = Mapping[str, Any]

RUN = ("model", "random_weights", "device", "threads", "dtype", "dropkv", "torch", "triton", "transformers")
NAMES = {"compress": "Compressing", "answer": "Answering"}
# Column, the figure it shows, its factor; "x" shows the ratio of the one before it.
COLUMNS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "compress": (
        ("prefill s", "prefill_seconds", 1),
        ("score s", "score_seconds", 1),
        ("both s", "seconds", 1),
        ("x", "seconds", 0),
        ("layer score ms", "layer_score_seconds", 1000),
        ("keep ms", "layer_keep_seconds", 1000),
        ("scratch MiB", "layer_scratch_bytes", 2**-20),
        ("peak GiB", "peak_memory_bytes", 2**-30),
        ("x", "peak_memory_bytes", 0),
    ),
    "answer": (
        ("first token s", "first_token_seconds", 1),
        ("x", "first_token_seconds", 0),
        ("step ms", "step_seconds", 1000),
        ("x", "step_seconds", 0),
        ("whole s", "total_seconds", 1),
        ("x", "total_seconds", 0),
        ("tokens/s", "tokens_per_second", 1),
        ("peak GiB", "peak_memory_bytes", 2**-30),
        ("x", "peak_memory_bytes", 0),
    ),
}
NOTES = {
    "compress": "x: against transformers' own prefill in the same run; below 1 is less. Layer: one alone, its scores from the window's queries, "
    "what is kept chosen and copied, and the memory that both want for themselves.",
    "answer": "x: against transformers with its dynamic cache in the same run; below 1 is less. First token: transformers reads the document, "
    "dropkv its file.",
}


def runs_of(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each model, machine and versions, in order of appearance."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(repr(line.get(name)) for name in RUN), []).append(line)
    return list(found.values())


def heading(run: Sequence[Line]) -> str:
    """What all lines of a run were measured with."""
    first = run[0]
    weights = ", random weights" if first.get("random_weights") else ""
    count = _whole(first.get("threads"))
    threads = f", {count} thread{'s' if count > 1 else ''}" if count else ""
    triton = f", triton {first['triton']}" if first.get("triton") else ""
    dates = sorted({str(line.get("date")) for line in run})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"{first.get('model')}{weights}, {first.get('dtype')}, {first.get('device')}{threads}, dropkv {first.get('dropkv')}, "
        f"torch {first.get('torch')}{triton}, transformers {first.get('transformers')}, {span}"
    )


def note_of(side: str, rows: Sequence[Line]) -> str:
    """What a table's figures are."""
    repeats = " or ".join(str(count) for count in sorted({_whole(line.get("repeat")) for line in rows}))
    more = ""
    if side == "answer":
        sizes = sorted({(_whole(line.get("question_tokens")), _whole(line.get("answer_tokens"))) for line in rows})
        more = " " + " ".join(f"Questions of {asked} tokens, answers of {given}." for asked, given in sizes)
    return f"Medians of {repeats}. {NOTES[side]}{more}"


def cells_of(side: str, rows: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of one side's table, ordered by length and batch size; out of memory stands in the first figure's cell."""
    batch = ["at once"] if side == "answer" else []
    head = ["tokens", *batch, "what", "budget", *(name for name, _, _ in COLUMNS[side])]
    ordered = sorted(rows, key=lambda line: (_whole(line.get("length")), _whole(line.get("batch_size"))))
    return head, [
        [
            f"{_whole(line.get('length')):,}",
            *(str(line.get("batch_size")) for _ in batch),
            shown_cell(line),
            DASH if line.get("method") == PLAIN else f"{100 * (_real(line.get('budget')) or 0):.4g} %",
            *_figures(side, line),
        ]
        for line in ordered
    ]


def shown_cell(line: Line) -> str:
    """What a line measures in a word or two."""
    observer = line.get("observer")
    return str(line.get("method")) if observer in (None, "none") else f"{line.get('method')} ({observer})"


def speed_tables(lines: Sequence[Line]) -> str:
    """All tables, for a terminal."""
    parts = []
    for run in runs_of(lines):
        parts.append(heading(run))
        for side, name in NAMES.items():
            rows = [line for line in run if line.get("side") == side]
            if rows:
                parts.append(f"{name}. {note_of(side, rows)}\n{_aligned(*cells_of(side, rows))}")
    return "\n\n".join(parts)


def number(value: float) -> str:
    """A figure with three digits that count, all of them where it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _figures(side: str, line: Line) -> list[str]:
    columns = COLUMNS[side]
    if line.get("outcome") == NO_MEMORY:
        return [NO_MEMORY, *[""] * (len(columns) - 1)]
    ratios = line.get("ratios")
    ratios = ratios if isinstance(ratios, Mapping) else {}
    cells = []
    for _, figure, factor in columns:
        value = _real(line.get(figure) if factor else ratios.get(figure))
        cells.append(DASH if value is None else number(value * (factor or 1)))
    return cells


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers to the right, `what` to the left; out of memory may run over the empty cells behind it."""
    widths = [max(len(row[column]) for row in (head, *rows) if row[column] != NO_MEMORY) for column in range(len(head))]
    left = list(head).index("what")
    lines = []
    for row in (head, *rows):
        if NO_MEMORY in row:
            row = row[: list(row).index(NO_MEMORY) + 1]
        cells = [
            cell.ljust(width) if place == left or cell == NO_MEMORY else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _real(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
