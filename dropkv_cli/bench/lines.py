"""JSON lines of a results folder, read without touching them, also while a run writes there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dropkv.bench.results import KEY, LINES, read_lines
from dropkv.bench.speed.plan import KEY as SPEED_KEY
from dropkv.bench.speed.plan import LINES as SPEED

THEORY = "theory.jsonl"
KEYS = {LINES: KEY, SPEED: SPEED_KEY}  # runs of theory are replaced as a whole

__all__ = ["LINES", "SPEED", "THEORY", "read_json_lines"]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none where there is no file, each key once; a last line that is not finished is passed over.

    Raises ResultsError naming the line that is damaged or of another version.
    """
    return list(read_lines(path, KEYS.get(path.name)))
