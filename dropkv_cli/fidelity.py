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


def fidelity_lines(values: Mapping[str, Any] | None) -> list[str]:
    """The `fidelity` of a file: what it means, then the numbers. What another version wrote is shown as far as it is understood."""
    if values is None:
        return [UNMEASURED]
    kept = _number(values, "kept_information")
    nll, full = _number(values, "nll"), _number(values, "nll_full")
    right, right_full = _number(values, "right"), _number(values, "right_full")
    lines, parts = [], []
    if kept is not None:
        lines.append(f"{percent(kept)} of what the document tells the model is kept: {grade(kept)}")
    elif nll is not None:
        lines.append("the model makes no use of the document, so there is nothing to lose")
    if right is not None and right_full is not None:
        parts.append(f"held-out tokens predicted right: {percent(right)}, by the full cache {percent(right_full)}")
    if nll is not None and full is not None:
        parts.append(f"{abs(nll - full):.2f} nats {'lost' if nll >= full else 'won'} per token")
    if parts:
        lines.append("; ".join(parts))
    return lines or ["measured in a way that this version does not know"]


def grade(kept: float) -> str:
    """What a share of kept information means for questions."""
    return next(words for least, words in GRADES if kept >= least)


def percent(share: float) -> str:
    """A share as whole per cents, rounded down: what is not all is never shown as 100, nor a share as one of the next grade."""
    return f"{max(0, min(math.floor(100 * share + 1e-9), 100))} %"


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
