"""What reaches the terminal: results on standard output, all else on standard error, JSON one object per line."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import click

UNITS = ("KiB", "MiB", "GiB", "TiB")
CONTROL = {code: None for code in (*range(9), *range(11, 32), *range(127, 160))}


SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST_LINE = 100  # characters of a question that is repeated


class ClosedOutput(io.TextIOBase):
    """Standard output that was closed before the program began (`>&-`): only who has a result to print fails."""

    def write(self, text: str) -> int:
        """Fails as the system does."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def safe_streams() -> None:
    """Streams that can be used: closed ones are replaced, and so are characters that the terminal's encoding lacks."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes this number, which a .kv file would get otherwise
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def forget(stream: IO[str]) -> None:
    """Its reader (such as head) has gone, or its disk is full: Python must not try again at exit, which would end with code 120."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: no real file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def result(text: str, *, newline: bool = True) -> None:
    """Print a result, flushed, so that a reader of a pipe or an answer that grows sees it at once."""
    click.echo(text, nl=newline)


def json_line(record: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, in ASCII, so that no locale spoils it.

    Lone surrogates, which stand for the bytes of a file name that is no text, become U+FFFD: other readers refuse them.
    """
    text = SURROGATE.sub("\ufffd", json.dumps(record, allow_nan=False, ensure_ascii=False))
    click.echo(re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], text))


def say(text: str) -> None:
    """Tell the user something that is not a result; when standard error is full or gone, nobody is left to tell."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def complain(text: str) -> None:
    """Say what failed, in one line."""
    say("dropkv: " + " ".join(text.split()))


def failure_keys(text: str, code: int = 1) -> dict[str, Any]:
    """What every line of JSON about a failure has: the line that people read, and the exit code it leads to."""
    return {"error": " ".join(text.split()), "exit": code}


def harmless(text: str) -> str:
    """Text of a model or a file without the control characters that steer a terminal; line feeds and tabs stay."""
    return text.translate(CONTROL)


def one_line(text: str, limit: int = LONGEST_LINE) -> str:
    """Text on one line, cut after `limit` characters."""
    line = harmless(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def compared(file_bytes: int, full_bytes: int) -> str:
    """How the size of a file compares with that of the full cache."""
    ratio = full_bytes / file_bytes
    if ratio >= 1.05:
        return f"{ratio:.1f} times smaller"
    percent = round(100 * (file_bytes / full_bytes - 1))
    return f"{percent:,} % larger" if percent >= 1 else "about as large"


def size(count: float) -> str:
    """Bytes as a person reads them."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in UNITS:
        count /= 1024
        if count < 999.5 or unit == UNITS[-1]:
            break
    return f"{count:.0f} {unit}" if count >= 99.5 else f"{count:.1f} {unit}"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns: names and values."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under a head, as wide as their widest cell, the last one ragged."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
