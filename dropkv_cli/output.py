"""What reaches the terminal: results on standard output, all else on standard error, JSON one object per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import TextIOWrapper
from typing import Any

import click

UNITS = ("KiB", "MiB", "GiB", "TiB")
CONTROL = {code: None for code in (*range(9), *range(11, 32), *range(127, 160))}


def safe_streams() -> None:
    """Characters that the terminal's encoding lacks are replaced instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def result(text: str, *, newline: bool = True) -> None:
    """Print a result, flushed, so that a reader of a pipe or an answer that grows sees it at once."""
    click.echo(text, nl=newline)


def json_line(record: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, in ASCII, so that no locale spoils it."""
    click.echo(json.dumps(record, allow_nan=False))


def say(text: str) -> None:
    """Tell the user something that is not a result."""
    click.echo(text, err=True)


def complain(text: str) -> None:
    """Say what failed, in one line."""
    say("dropkv: " + " ".join(text.split()))


def harmless(text: str) -> str:
    """Text of a model or a file without the control characters that steer a terminal; line feeds and tabs stay."""
    return text.translate(CONTROL)


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
