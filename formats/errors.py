"""The closed family of errors of a KV file; a message is one line: which file, which place, what is wrong, what to do.

`where` and `path` are filled in by whoever knows them: code that checks JSON or tensors knows the place,
code that opened the file knows its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

MAKE_AGAIN = "download it again, or make it again with `dropkv compress`"


class FormatError(Exception):
    """Base of every expected failure of reading or writing a KV file; commands print it and leave with `exit_code`."""

    exit_code = 1
    default_fix = ""

    def __init__(self, what: str, *, where: str = "", fix: str = "", path: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix or self.default_fix
        self.path = path

    def __str__(self) -> str:
        line = ": ".join(part for part in (self.path, self.where, self.what) if part)
        return f"{line}; {self.fix}" if self.fix else line


class UnreadableFile(FormatError):
    """The file cannot be opened or read at all: missing, no permission, a directory, a pipe, a failing disk."""


class NotAKVFile(FormatError):
    """The file is something else; the message names what it is."""

    default_fix = "give a file made by `dropkv compress`"


class UnsupportedVersion(FormatError):
    """A KV file that needs a newer reader."""

    default_fix = "update with `pip install -U dropkv`"


class CorruptFile(FormatError):
    """A KV file with a changed, missing or contradictory byte."""

    default_fix = MAKE_AGAIN


class ExistingFile(FormatError):
    """The target exists and was not to be replaced."""

    default_fix = "choose another name, or replace it with overwrite=True"


class WriteFailed(FormatError):
    """The file could not be written; whatever stood at the target before is still there, untouched."""


def show_path(path: str | os.PathLike[str]) -> str:
    """The path as text that stays on one line and cannot steer a terminal."""
    return printable(os.fsdecode(path))


def printable(text: str, limit: int = 4096) -> str:
    """Text from outside made safe for one line of a message: control characters escaped, length bounded."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= limit else shown[:limit] + "..."


class Named(Protocol):
    """Anything that has a name for messages, such as a file that is no path of this machine."""

    @property
    def shown(self) -> str: ...


def show_place(place: str | os.PathLike[str] | Named) -> str:
    """The name of a file for messages, wherever it is."""
    if isinstance(place, str | os.PathLike):
        return show_path(place)
    return getattr(place, "shown", None) or printable(
        repr(place), 80
    )  # the latter is no name at all, which is said next


@contextmanager
def naming(path: str | os.PathLike[str] | Named) -> Iterator[None]:
    """Put the file's name into every FormatError that leaves the block without one."""
    try:
        yield
    except FormatError as error:
        error.path = error.path or show_place(path)
        raise
