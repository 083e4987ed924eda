"""Line charts as inline SVG: accuracy against budget, and against bytes. Colours and sizes live in the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dropkv.bench.report.html import text

WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 14, 46
COLOURS = 10
Place = Callable[[float, int], float]  # pixel of an x value for the index-th line
MARKS = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True)
class Point:
    """A mean at a place on the x axis with its interval, all y in [0, 1]; note: what a pointer resting on it shows."""

    x: float
    mean: float
    low: float
    high: float
    note: str


@dataclass(frozen=True)
class Series:
    """One line of a chart; number: its colour and mark, the same in every chart of a group. flat: a level across the whole chart.
    shown: whether it is seen before its button is pressed.
    """

    name: str
    number: int
    points: tuple[Point, ...]
    flat: bool = False
    shown: bool = True


def category_chart(title: str, axis: str, names: Sequence[str], series: Sequence[Series]) -> str:
    """Points at equally spaced categories (x = index into names), lines a little apart so that intervals can be told from each other."""
    slot = (WIDTH - LEFT - RIGHT) / len(names)
    beside = max(1, sum(line.shown and not line.flat for line in series))
    apart = min(6.0, 0.7 * slot / beside)

    def place(x: float, index: int) -> float:
        return LEFT + slot * (x + 0.5) + (index % beside - (beside - 1) / 2) * apart

    ticks = [(LEFT + slot * (index + 0.5), name) for index, name in enumerate(names)]
    return _chart(title, axis, ticks, series, place)


def log_chart(title: str, axis: str, series: Sequence[Series], name: Sequence[tuple[float, str]]) -> str:
    """Points at their own x > 0 on a logarithmic axis; name: ticks as (x, label)."""
    every = [point.x for line in series for point in line.points] or [1.0]
    low, high = math.log(min(every)), math.log(max(every))
    margin = 0.06 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def place(x: float, index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(x) - low) / (high - low)

    ticks = [(place(x, 0), label) for x, label in name if low <= math.log(x) <= high]
    return _chart(title, axis, ticks, series, place)


def _chart(title: str, axis: str, ticks: Sequence[tuple[float, str]], series: Sequence[Series], place: Place) -> str:
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}"><title>{text(title)}</title>'
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{_y(share) + 4.5:.1f}">{100 * share:g}</text>')
    for x, label in ticks:
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 19}">{text(label)}</text>')
    parts.append(f'<text class="axis mid" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{text(axis)}</text>')
    parts.append(
        f'<text class="axis mid" transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">accuracy, %</text>'
    )
    index = 0
    for line in series:
        parts.append(_level(line) if line.flat else _line(line, index, place))
        index += line.shown and not line.flat
    return "".join(parts) + "</svg>"


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _level(line: Series) -> str:
    point = line.points[0]
    y = _y(point.mean)
    return (
        f'<g class="{_classes(line)}" data-series="{line.number}"><title>{text(point.note)}</title>'
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/></g>'
    )


def _line(line: Series, index: int, place: Place) -> str:
    where = [(place(point.x, index), point) for point in sorted(line.points, key=lambda point: point.x)]
    path = " ".join(f"{x:.1f},{_y(point.mean):.1f}" for x, point in where)
    parts = [f'<g class="{_classes(line)}" data-series="{line.number}">']
    if len(where) > 1:
        parts.append(f'<polyline class="line d{line.number // COLOURS % 3}" points="{path}"/>')
    for x, point in where:
        parts.append(
            f'<g><title>{text(point.note)}</title><line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(point.low):.1f}" '
            f'y2="{_y(point.high):.1f}"/>{mark(line.number, x, _y(point.mean))}</g>'
        )
    return "".join(parts) + "</g>"


def _classes(line: Series) -> str:
    return f"s{line.number % COLOURS}{'' if line.shown else ' off'}"


def mark(number: int, x: float, y: float) -> str:
    """A series' mark around a pixel."""
    shape = MARKS[number % len(MARKS)]
    if shape == "circle":
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if shape == "square":
        return f'<rect class="mark" x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>'
    if shape == "triangle":
        return f'<path class="mark" d="M{x:.1f} {y - 4.8:.1f}l4.8 8.4h-9.6z"/>'
    return f'<path class="mark" d="M{x:.1f} {y - 5.2:.1f}l5.2 5.2l-5.2 5.2l-5.2-5.2z"/>'


def legend(series: Sequence[Series]) -> str:
    """Buttons that show and hide the lines of a group's charts."""
    items = []
    for line in series:
        n = line.number
        sign = (
            '<line class="level" x1="1" x2="27" y1="8" y2="8"/>'
            if line.flat
            else f'<line class="line d{n // COLOURS % 3}" x1="1" x2="27" y1="8" y2="8"/>{mark(n, 14, 8)}'
        )
        items.append(
            f'<button type="button" aria-pressed="{str(line.shown).lower()}" data-toggle="{n}"><svg viewBox="0 0 28 16" width="28" height="16" '
            f'aria-hidden="true"><g class="s{n % COLOURS}">{sign}</g></svg>{text(line.name, 60)}</button>'
        )
    return f'<div class="legend" role="group" aria-label="show or hide methods">{"".join(items)}</div>'
