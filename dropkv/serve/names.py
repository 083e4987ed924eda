"""What files are called as models: NAME=FILE as it is written, else the file's own name without .kv."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from dropkv.errors import DropkvError, UsageError
from dropkv.hub.address import is_address
from formats.errors import printable, show_path

SUFFIX = re.compile(r"\.kv(\.safetensors)?$")
NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)


def plan_names(files: Sequence[str]) -> dict[str, str]:
    """Name and file of each, in the order given; a folder stands for the .kv files in it.

    Raises UsageError for an empty name, a pipe, a file given twice and two that would be called the same, DropkvError for a folder without files.
    """
    found: dict[str, str] = {}
    for written in files:
        for name, file in _named(written):
            if found.get(name) == file:
                raise UsageError(f"the file {show_path(file)} is given twice: name each one once")
            if name in found:
                both = f"{show_path(found[name])} and {show_path(file)}"
                raise UsageError(f"{both} would both be called {printable(name)}: write NAME=FILE for one of them")
            found[name] = file
    return found


def _named(written: str) -> Iterator[tuple[str, str]]:
    match = NAMED.fullmatch(written)
    if match and not os.path.lexists(written):
        yield match[1].strip(), match[2]
    elif not written:
        raise UsageError("a file has an empty name: name a .kv file")
    elif written == "-":
        raise UsageError("a .kv file cannot be read from a pipe: name the file, or ./- for a file of that name")
    elif os.path.isdir(written):
        yield from ((own_name(file), file) for file in _files_in(written))
    else:
        yield own_name(written), written


def own_name(file: str) -> str:
    """A file's name without folders and .kv; that of an address of the Hub is the repository's where it names no file."""
    path = file.split("@", 1)[0] if is_address(file) and not SUFFIX.search(file) else file
    last = path.rstrip("/").rsplit("/", 1)[-1]
    return SUFFIX.sub("", last) or last


def _files_in(folder: str) -> list[str]:
    try:
        found = sorted(entry.path for entry in os.scandir(folder) if entry.is_file() and SUFFIX.search(entry.name))
    except OSError as error:
        raise DropkvError(f"{show_path(folder)}: cannot be read ({error.strerror}), check its permissions") from None
    if not found:
        raise DropkvError(f"{show_path(folder)}: no .kv file lies in this folder: make one with `dropkv compress`")
    return found
