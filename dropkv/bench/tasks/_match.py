"""RULER's scoring: which of the reference strings stand in the answer, whatever their case."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def match_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that the prediction holds."""
    text = _plain(prediction)
    return sum(answer.lower() in text for answer in answers) / len(answers)


def match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 when the prediction holds one of the answers, else 0."""
    text = _plain(prediction)
    return float(any(answer.lower() in text for answer in answers))


def _plain(prediction: str) -> str:
    # Every control character becomes a line end, so an answer broken by one does not count.
    return _CONTROL.sub("\n", prediction.strip()).strip().lower()
