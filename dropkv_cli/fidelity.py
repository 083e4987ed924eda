"""What a file's fidelity means, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# From which share of the information on, and what it means for questions (measured: benchmarks/RESULTS.md, "Fidelity").
GRADES = (
    (0.99, "as good as the full cache"),
    (0.9, "few facts are lost"),
    (0.5, "many facts are lost, a larger budget helps"),
    (float("-inf"), "most facts are lost, use a larger budget"),
)
UNMEASURED = "not measured"
CAVEAT = "it compares predictions with the full cache's: what the budget costs, not whether the model can answer"
CHOSEN = "passages from all over it say nothing about that: ask, and compare with a file of --budget 1.0"


def fidelity_lines(values: Mapping[str, Any] | None, observer: Mapping[str, Any]) -> list[str]:
    """The `fidelity` of a file made with an observer: what it means and what not, then the numbers. What another version wrote is shown as
    far as it is understood."""
    if values is None:
        return [UNMEASURED]
    kept = _number(values, "kept_information")
    nll, full = _number(values, "nll"), _number(values, "nll_full")
    right, right_full = _number(values, "right"), _number(values, "right_full")
    lines, parts, caveat = [], [], ""
    chosen_for = asked_before(observer)
    if kept is not None and chosen_for:
        lines.append(
            f"{percent(kept)} of what the whole document tells the model is kept, chosen for {chosen_for} alone"
        )
        caveat = CHOSEN
    elif kept is not None:
        lines.append(f"{percent(kept)} of what the document tells the model is kept: {grade(kept)}")
        caveat = CAVEAT
    elif nll is not None:
        lines.append("the model makes no use of the document, so there is nothing to lose")
    if right is not None and right_full is not None:
        parts.append(f"held-out tokens predicted right: {percent(right)}, by the full cache {percent(right_full)}")
    if nll is not None and full is not None:
        parts.append(f"{abs(nll - full):.2f} nats {'lost' if nll >= full else 'won'} per token")
    if parts:
        lines.append("; ".join(parts))
    if caveat:
        lines.append(caveat)
    return lines or ["measured in a way that this version does not know"]


def asked_before(observer: Mapping[str, Any]) -> str:
    """The questions that a file's entries were chosen for, in words, or nothing where they were chosen for any."""
    name, count = observer.get("name"), observer.get("count")
    if name == "question" or (name == "questions" and count == 1):
        return "one question"
    if name != "questions":
        return ""
    return f"{count:,} questions" if isinstance(count, int) else "given questions"


def grade(kept: float) -> str:
    """What a share of kept information means for questions."""
    return next(words for least, words in GRADES if kept >= least)


def percent(share: float) -> str:
    """A share as whole per cents, rounded down: what is not all is never shown as 100, nor a share as one of the next grade."""
    return f"{max(0, min(math.floor(100 * share + 1e-9), 100))} %"


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
