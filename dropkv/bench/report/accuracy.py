"""The sections of accuracy results: one per group, its charts, tables, grids and some of the answers."""

from __future__ import annotations

from collections.abc import Sequence

from dropkv.bench.report.charts import Point, Series, category_chart, legend, log_chart
from dropkv.bench.report.grids import budget_maps, depth_grids
from dropkv.bench.report.groups import CONTROLS, FLAT, Group, Rows
from dropkv.bench.report.html import Column, Value, budget_name, percent, signed, size, table, text
from dropkv.bench.stats import RESAMPLES, Estimate, estimate

LONG = 30  # rows from which a table is folded away
LINES = 8  # methods that a chart shows at first; its buttons bring the others
ANSWERS = 60  # at most so many answers of a group are shown

WAYS = {
    "Wilson": "Wilson",
    "bootstrap": f"bootstrap, {RESAMPLES} resamplings of each task's documents",
    "none": "none from a single document",
}


def section(group: Group, anchor: str) -> str:
    """One group as HTML."""
    rows = group.estimates()
    return (
        f'<section class="group" id="{anchor}"><h3>{text(heading(group))}</h3><p class="what">{text(describe(group))}</p>'
        f"{_charts(group, rows)}{_overview(group, rows)}{_summary(group, rows)}{depth_grids(group) if group.grid else ''}{_by_task(group)}"
        f"{budget_maps(group)}{_answers(group)}</section>"
    )


def heading(group: Group) -> str:
    """A group's name inside its setting."""
    lengths = [f"{length:,}" for length in group.lengths]
    span = lengths[0] if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f"{group.label}, {span} tokens, {group.model}"


def describe(group: Group) -> str:
    """Setting, model, samples and seed: what every table says."""
    samples = " to ".join(str(count) for count in dict.fromkeys(group.samples))
    seeds = ", ".join(str(seed) for seed in group.seeds)
    observers = f", observer {' and '.join(group.observers)}" if group.observers else ""
    return f"{group.setting}{observers}; {group.model}; {samples} samples a task; seed {seeds}"


def _charts(group: Group, rows: Rows) -> str:
    budgets = sorted({cell.budget for cell, _, _ in rows if cell.method not in FLAT})
    by_budget, by_bytes = [], []
    shown = _shown(group, rows)
    for number, series in enumerate(group.ranked(rows)):
        flat = series[0] in FLAT
        own = [(cell, found) for cell, found, _ in rows if cell.series == series]
        points, weights = [], []
        for cell, found in own:
            name = group.name(series) if flat else f"{group.name(series)} at {budget_name(cell.budget)}"
            note = f"{name}: {_interval(found)} %, {size(cell.kept_bytes)} a document"
            x = 0 if flat else budgets.index(cell.budget)
            points.append(Point(x, found.mean, found.low, found.high, note))
            if cell.kept_bytes > 0:
                weights.append(Point(cell.kept_bytes, found.mean, found.low, found.high, note))
        by_budget.append(Series(group.name(series), number, tuple(points), flat, series in shown))
        if weights:
            by_bytes.append(Series(group.name(series), number, tuple(weights), shown=series in shown))
    lines = [line for line in by_budget if not line.flat]
    if not lines:
        return ""
    place = f"{group.setting}, {heading(group)}"
    first = category_chart(
        f"Accuracy against budget, {place}",
        "budget: kept entries of each KV head",
        [budget_name(b) for b in budgets],
        by_budget,
    )
    second = log_chart(f"Accuracy against bytes, {place}", "kept bytes of a document", by_bytes, _byte_ticks(by_bytes))
    hidden = len(by_budget) - len(shown)
    note = (
        "Means with 95 % intervals; levels are controls without a budget. The buttons, best method first, show and hide methods"
        + (f"; {hidden} are hidden at first, among them those that are equal to one that is shown." if hidden else ".")
    )
    return (
        f'<div class="charts"><figure><figcaption>Accuracy against budget</figcaption>{first}</figure>'
        f"<figure><figcaption>Accuracy against bytes</figcaption>{second}</figure></div>{legend(by_budget)}"
        f'<p class="note">{text(note)}</p>'
    )


def _shown(group: Group, rows: Rows) -> set[tuple[str, str]]:
    """Controls and the best LINES methods; of methods with the same results one."""
    shown, seen = set(), set[tuple[float, ...]]()
    for series in group.ranked(rows):
        means = tuple(found.mean for cell, found, _ in rows if cell.series == series)
        if series[0] in CONTROLS or (means not in seen and len(seen) < LINES):
            shown.add(series)
        if series[0] not in CONTROLS:
            seen.add(means)
    return shown


def _byte_ticks(series: Sequence[Series]) -> list[tuple[float, str]]:
    """Powers of two, at most about six of them."""
    every = [point.x for line in series for point in line.points]
    if not every:
        return []
    first, last = 0, 0
    while 2 ** (first + 1) <= min(every):
        first += 1
    while 2**last < max(every):
        last += 1
    step = max(1, -(-(last - first + 1) // 6))
    return [(float(2**power), size(2**power)) for power in range(first, last + 1, step)]


def _overview(group: Group, rows: Rows) -> str:
    """A row for each method, a column for each budget; nothing where there is one budget."""
    budgets = sorted({cell.budget for cell, _, _ in rows if cell.method not in FLAT})
    if len(budgets) < 2:
        return ""
    first = group.first()
    base = group.name(first) if first else ""
    caption = (
        f"{describe(group)}. Mean of the tasks' accuracies in %, best method first; beside it the difference to {base} at the same budget, in "
        f"points, with its 95 % interval, or the mean's own interval."
    )
    columns = [Column("method", number=False), *(Column(budget_name(budget)) for budget in budgets)]
    found = {(cell.series, 0.0 if cell.method in FLAT else cell.budget): (own, other) for cell, own, other in rows}
    body = []
    for series in group.ranked(rows):
        row = [Value(group.name(series))]
        for budget in budgets:
            own, other = found.get((series, 0.0 if series[0] in FLAT else budget), (None, None))
            if own is None:
                row.append(Value("\N{EN DASH}"))
                continue
            beside = (
                _range(own) if other is None else f"{signed(other.mean)}, {signed(other.low)} to {signed(other.high)}"
            )
            row.append(Value(percent(own.mean), own.mean, beside))
        body.append(row)
    return f'<div class="overview">{table(caption, columns, body, group=heading(group))}</div>'


def _summary(group: Group, rows: Rows) -> str:
    first = group.first()
    base = group.name(first) if first else ""
    ways = " or ".join(WAYS[how] for how in sorted({found.how for _, found, _ in rows}))
    caption = (
        f"{describe(group)}. Mean of the tasks' accuracies in % with 95 % intervals ({ways}); "
        f"difference to {base} at the same budget, in points, over the questions both answered."
    )
    columns = [
        Column("method", number=False),
        Column("budget"),
        Column("accuracy, %"),
        Column(f"against {base}"),
        Column("questions", hint="answers this row rests on"),
        Column("samples", hint="documents this row rests on, over all tasks"),
        Column("kept", hint="kept entries of all entries"),
        Column("bytes", hint="mean of a document"),
    ]
    body = []
    for cell, found, compared in rows:
        flat = cell.method in FLAT
        share = cell.kept_share
        body.append(
            [
                Value(group.name(cell.series)),
                Value("\N{EN DASH}") if flat else Value(budget_name(cell.budget), cell.budget),
                Value(percent(found.mean), found.mean, _range(found)),
                Value("\N{EN DASH}")
                if compared is None
                else Value(signed(compared.mean), compared.mean, f"{signed(compared.low)} to {signed(compared.high)}"),
                Value(str(found.questions), found.questions),
                Value(str(found.samples), found.samples),
                Value("\N{EN DASH}") if share is None else Value(f"{percent(share)} %", share),
                Value(size(cell.kept_bytes), cell.kept_bytes),
            ]
        )
    inner = table(caption, columns, body, group=heading(group))
    return f"<details{' open' if len(body) <= LONG else ''}><summary>All cells</summary>{inner}</details>"


def _by_task(group: Group) -> str:
    if len(group.tasks) < 2:
        return ""
    columns = [Column("method", number=False), Column("budget"), *(Column(task) for task in group.tasks)]
    body = []
    for cell in group.cells:
        row = [
            Value(group.name(cell.series)),
            Value("\N{EN DASH}") if cell.method in FLAT else Value(budget_name(cell.budget), cell.budget),
        ]
        for task in group.tasks:
            scores = cell.of_task(task)
            if not scores:
                row.append(Value("\N{EN DASH}"))
                continue
            found = estimate(scores)
            row.append(Value(percent(found.mean), found.mean, _range(found)))
        body.append(row)
    inner = table(
        f"{describe(group)}. Accuracy of each task in % with 95 % intervals.", columns, body, group=heading(group)
    )
    return f"<details{' open' if len(body) <= LONG else ''}><summary>By task</summary>{inner}</details>"


def _answers(group: Group) -> str:
    """Answers to the first sample's questions, so that a reader sees what was scored."""
    every = [(cell, result) for cell in group.cells for result in cell.results.values()]
    least = min((result.seed, result.sample) for _, result in every)
    chosen = [(cell, r) for cell, r in every if (r.seed, r.sample) == least and r.question == 0]
    shown = chosen[:: max(1, -(-len(chosen) // ANSWERS))]
    columns = [
        Column("method", number=False),
        Column("budget"),
        Column("task", number=False),
        Column("score, %"),
        Column("prediction", number=False),
        Column("answers", number=False),
    ]
    body = [
        [
            Value(group.name(cell.series)),
            Value("\N{EN DASH}") if cell.method in FLAT else Value(budget_name(cell.budget), cell.budget),
            Value(result.task),
            Value(percent(result.score), result.score),
            Value(result.prediction),
            Value(", ".join(result.answers)),
        ]
        for cell, result in shown
    ]
    caption = f"{describe(group)}. {len(shown)} of {len(chosen)} answers to the first question of the first sample."
    return f'<details class="answers"><summary>Some answers</summary>{table(caption, columns, body, group=heading(group))}</details>'


def _range(found: Estimate) -> str:
    return f"{percent(found.low)} to {percent(found.high)}"


def _interval(found: Estimate) -> str:
    return f"{percent(found.mean)} ({_range(found)})"
