"""Heat maps and bars as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.bench.report.html import text

STRONG = 0.65  # from here a cell's number is drawn in the page's background colour


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    shares: Sequence[Sequence[float | None]],
    shown: Sequence[Sequence[str]],
    *,
    row_axis: str,
    column_axis: str,
    wide: int = 44,
    high: int = 20,
    small: bool = False,
) -> str:
    """A grid of cells: shares [rows][columns] in [0, 1] are the strength of the colour, None an empty cell; shown the texts on them.

    small: the texts do not fit on the cells, a pointer that rests on one shows its own.
    """
    left, top = 22 + 8 * max((len(name) for name in rows), default=1), 38
    width, height = left + wide * len(columns) + 4, top + high * len(rows) + 4
    parts = [
        f'<svg class="heat" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{text(title)}"><title>{text(title)}</title>'
    ]
    parts.append(f'<text class="axis mid" x="{left + wide * len(columns) / 2:.1f}" y="12">{text(column_axis)}</text>')
    parts.append(
        f'<text class="axis mid" transform="translate(11 {top + high * len(rows) / 2:.1f}) rotate(-90)">{text(row_axis)}</text>'
    )
    for index, name in enumerate(columns):
        parts.append(f'<text class="tick mid" x="{left + wide * (index + 0.5):.1f}" y="30">{text(name)}</text>')
    for r, name in enumerate(rows):
        y = top + high * r
        parts.append(f'<text class="tick end" x="{left - 5}" y="{y + high / 2 + 4:.1f}">{text(name)}</text>')
        for c, share in enumerate(shares[r]):
            if share is None:
                continue
            x = left + wide * c
            tone = "strong" if share >= STRONG else "weak"
            note = text(f"{row_axis} {name}, {column_axis} {columns[c]}: {shown[r][c]}")
            parts.append(
                f'<g><title>{note}</title><rect class="cell" x="{x}" y="{y}" width="{wide - 1}" height="{high - 1}" '
                f'fill-opacity="{min(1.0, max(0.0, share)):.3f}"/>'
                + (
                    f'<text class="{tone} mid" x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}">{text(shown[r][c])}</text></g>'
                    if shown[r][c] and not small
                    else "</g>"
                )
            )
    return "".join(parts) + "</svg>"


def bars(title: str, names: Sequence[str], counts: Sequence[int], axis: str) -> str:
    """A histogram: one bar per count, its number above; a name below every other bar where they are many."""
    wide, high, left, top = 25, 130, 8, 20
    width, height = left * 2 + wide * len(counts), top + high + 44
    most = max([*counts, 1])
    parts = [
        f'<svg class="heat" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{text(title)}"><title>{text(title)}</title>'
        f'<line class="grid" x1="{left}" x2="{width - left}" y1="{top + high}" y2="{top + high}"/>'
    ]
    step = 1 if len(counts) <= 8 else 3
    for index, (name, count) in enumerate(zip(names, counts, strict=True)):
        tall, x = high * count / most, left + wide * index
        if count:
            parts.append(
                f'<g><title>{text(f"{name}: {count}")}</title><rect class="cell" x="{x + 2}" y="{top + high - tall:.1f}" '
                f'width="{wide - 4}" height="{tall:.1f}"/>'
                f'<text class="tick mid" x="{x + wide / 2}" y="{top + high - tall - 4:.1f}">{count}</text></g>'
            )
        if index % step == 0:
            parts.append(f'<text class="tick mid" x="{x + wide / 2}" y="{top + high + 16}">{text(name)}</text>')
    parts.append(f'<text class="axis mid" x="{width / 2}" y="{height - 8}">{text(axis)}</text>')
    return "".join(parts) + "</svg>"
