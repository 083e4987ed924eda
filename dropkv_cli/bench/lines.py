"""JSON lines of a results folder, read without touching them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dropkv.bench.results import LINES, VERSION
from dropkv.errors import ResultsError
from formats.errors import show_path

THEORY = "theory.jsonl"
SPEED = "speed.jsonl"

__all__ = ["LINES", "SPEED", "THEORY", "read_json_lines"]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none where there is no file; a last line that was never finished is passed over.

    Raises ResultsError naming the line that is damaged or of another version.
    """
    shown, lines = show_path(path), []
    try:
        raw = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ResultsError(f"{shown}: cannot be read ({error.strerror}): name another folder") from None
    for number, text in enumerate(raw.splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            break
        try:
            line = json.loads(text)
        except ValueError:
            raise ResultsError(f"{shown}: line {number} is damaged: remove it, or name another folder") from None
        if not isinstance(line, dict) or line.get("version") != VERSION:
            raise ResultsError(f"{shown}: line {number} is of another version: name another folder")
        lines.append(line)
    return lines
