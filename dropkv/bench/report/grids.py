"""Heat maps of a group: depth x length of needles, and the budgets that adaptive methods gave to layers and heads."""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.bench.report.groups import FLAT, Cell, Group
from dropkv.bench.report.heat import heat_map
from dropkv.bench.report.html import budget_name, percent, text

MOST_DEPTHS = 21  # more different depths than that are shown in tenths
WIDEST = 16  # KV heads of a layer whose numbers fit on their cells


def depth_grids(group: Group) -> str:
    """Per method and budget: mean accuracy by depth of the needle (rows) and length of the document (columns)."""
    depths = sorted({_depth(r.depth) for cell in group.cells for r in cell.results.values() if r.depth is not None})
    tenths = len(depths) > MOST_DEPTHS
    if tenths:
        depths = sorted({round(depth, 1) for depth in depths})
    rows, columns = [f"{100 * depth:.4g} %" for depth in depths], [_thousands(length) for length in group.lengths]
    figures = []
    for cell in group.cells:
        scores: dict[tuple[float, int], list[float]] = {}
        for result in cell.results.values():
            if result.depth is not None:
                depth = round(result.depth, 1) if tenths else _depth(result.depth)
                scores.setdefault((depth, result.length), []).append(result.score)
        means: list[list[float | None]] = [
            [_mean(scores.get((depth, length), [])) for length in group.lengths] for depth in depths
        ]
        shown = [["" if mean is None else percent(mean, 0) for mean in line] for line in means]
        name = _name(group, cell)
        title = f"Accuracy by depth and length, {name}, {group.setting}, {group.model}"
        picture = heat_map(title, rows, columns, means, shown, row_axis="depth", column_axis="tokens")
        figures.append(f"<figure><figcaption>{text(name)}</figcaption>{picture}</figure>")
    return (
        f'<h4>Needle by depth and length</h4><p class="note">{text(_what(group))}. Mean accuracy in %.</p>'
        f'<div class="maps">{"".join(figures)}</div>'
    )


def budget_maps(group: Group) -> str:
    """Kept entries by layer (rows) and KV head (columns), mean of the shown documents, where heads got different counts.

    The first method with all its budgets; the others, folded away, with their smallest.
    """
    figures: dict[tuple[str, str], list[str]] = {}
    for cell in sorted(group.cells, key=lambda cell: cell.budget):
        if figures.get(cell.series) and cell.series != group.first():
            continue
        grids = [result.head_counts for result in cell.per_document() if result.head_counts]
        if not grids or all(len({count for layer in grid for count in layer}) < 2 for grid in grids):
            continue
        shape = [len(layer) for layer in grids[0]]
        grids = [grid for grid in grids if [len(layer) for layer in grid] == shape]
        means = [
            [sum(grid[row][column] for grid in grids) / len(grids) for column in range(heads)]
            for row, heads in enumerate(shape)
        ]
        most = max(max(line, default=0.0) for line in means) or 1.0
        heads = max(shape)
        small = heads > WIDEST
        shares: list[list[float | None]] = [[value / most for value in line] for line in means]
        shown = [[f"{value:.0f}" for value in line] for line in means]
        name = _name(group, cell)
        picture = heat_map(
            f"Kept entries by layer and KV head, {name}, {group.setting}, {group.model}",
            [str(layer) for layer in range(len(means))],
            [str(head) for head in range(heads)],
            shares,
            shown,
            row_axis="layer",
            column_axis="KV head",
            wide=14 if small else 44,
            high=16,
            small=small,
        )
        figures.setdefault(cell.series, []).append(
            f"<figure><figcaption>{text(name)} <small>{len(grids)} documents, most {most:.0f}</small></figcaption>{picture}</figure>"
        )
    if not figures:
        return ""
    ordered = [series for series in group.series if series in figures]
    first, *others = ["".join(figures[series]) for series in ordered]
    more = f"<details><summary>Other methods</summary>{_maps(others)}</details>" if others else ""
    return (
        f'<h4>Budgets by layer and head</h4><p class="note">{text(_what(group))}. Kept entries, mean of the first documents; '
        f"the colour is relative to the largest of a map. Methods other than the first are shown at their smallest budget.</p>"
        f"{_maps([first])}{more}"
    )


def _maps(figures: Sequence[str]) -> str:
    return f'<div class="maps">{"".join(figures)}</div>'


def _what(group: Group) -> str:
    seeds = ", ".join(str(seed) for seed in group.seeds)
    samples = " to ".join(str(count) for count in dict.fromkeys(group.samples))
    return f"{group.setting}; {group.model}; {samples} samples a task; seed {seeds}"


def _name(group: Group, cell: Cell) -> str:
    name = group.name(cell.series)
    return name if cell.method in FLAT else f"{name}, {budget_name(cell.budget)}"


def _depth(depth: float | None) -> float:
    return round(depth or 0.0, 3)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _thousands(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)
