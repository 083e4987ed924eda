"""Results as a table: every recipe's share of the full cache, and its paired difference to today's default."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from benchmarks.question_free.written import NAME as WRITTEN
from dropkv.bench.results import Line
from dropkv.bench.stats import Key, difference, estimate

FULL = "full"


def document_of(line: Line) -> Hashable:
    """What tells a task's documents apart: a sample of a seed; every seed has the same ones of the task `written`."""
    return line["sample"] if line["task"] == WRITTEN else (line["seed"], line["sample"])


def table(lines: Iterable[Line], default: str) -> str:
    """Rows sorted by the mean over the budgets of the share of the full cache; differences in points, with 95 % intervals (bootstrap over
    documents inside tasks). "nats" is the mean of the right answer's, where it was measured, each at most 30."""
    scores: dict[str, dict[float, dict[Key, float]]] = defaultdict(lambda: defaultdict(dict))
    nats: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        scores[line["method"]][line["budget"]][line["task"], document_of(line), line["question"]] = line["score"]
        if line.get("nats") is not None:
            nats[line["method"]][line["budget"]].append(min(30.0, line["nats"]))
    if FULL not in scores:
        return "no results yet"
    whole = scores.pop(FULL)[1.0]
    budgets = sorted({budget for own in scores.values() for budget in own})
    rows = []
    for name, own in scores.items():
        shares, cells = [], []
        for budget in budgets:
            if not own[budget]:
                cells.append(f"{'-':>36}")
                continue
            answered = {key: whole[key] for key in own[budget]}
            mean = estimate(own[budget]).mean
            shares.append(mean / max(1e-9, estimate(answered).mean))
            text = f"{100 * mean:5.1f} {shares[-1]:5.3f}"
            against = difference(own[budget], scores[default][budget]) if default in scores else None
            if against is not None and name != default:
                text += f" {100 * against.mean:+6.1f} ({100 * against.low:+5.1f} {100 * against.high:+5.1f})"
            if nats[name][budget]:
                text += f" {sum(nats[name][budget]) / len(nats[name][budget]):5.2f}"
            cells.append(f"{text:>36}")
        count = max((len(part) for part in own.values()), default=0)
        rows.append((sum(shares) / max(1, len(shares)), name, cells, count))
    head = f"{'recipe':44}{'share':>6} " + " ".join(
        f"{f'{100 * budget:g} %: mean share diff nats':>36}" for budget in budgets
    )
    full = estimate(whole)
    parts = [
        f"full cache {100 * full.mean:.1f} ({100 * full.low:.1f} to {100 * full.high:.1f}), {full.samples} documents",
        head,
    ]
    for share, name, cells, count in sorted(rows, key=lambda row: (-row[0], row[1])):
        parts.append(f"{name:44}{share:6.3f} " + " ".join(cells) + f"  n {count}")
    return "\n".join(parts)
