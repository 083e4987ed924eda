"""Questions of a text file, one a line: those to ask, and those that observe a document."""

from __future__ import annotations

from pathlib import Path

from dropkv.documents import to_utf8
from dropkv.errors import QuestionError
from formats.errors import show_path

FORM = "give a text file with one question a line"


def read_questions(path: str | Path) -> tuple[str, ...]:
    """The questions of a UTF-8 text file. Raises QuestionError when it cannot be read or holds none."""
    shown = show_path(path)
    try:
        raw = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise QuestionError(f"{shown}: cannot be read ({getattr(error, 'strerror', None) or error}): {FORM}") from None
    return questions_in(raw, shown)


def questions_in(raw: bytes, shown: str) -> tuple[str, ...]:
    """The lines of a UTF-8 text but blank ones and those that start with #. Raises QuestionError when it is none or holds none."""
    try:
        lines = [line.strip() for line in raw.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise QuestionError(f"{shown}: is not UTF-8 text; convert it: {to_utf8(raw)}") from None
    questions = tuple(line for line in lines if line and not line.startswith("#"))
    if not questions:
        raise QuestionError(f"no question in {shown}: write one a line")
    return questions
