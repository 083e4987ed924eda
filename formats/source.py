"""Where the bytes of a KV file come from: a regular file, or anything else with a size and positioned reads."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from formats.errors import CorruptFile, UnreadableFile


class Source(Protocol):
    """Positioned reads from `size` bytes; `read_into` may be called from several threads at once.

    `threads` is how many of them pay off: a disk is busy with few, a network waits for most of the time. `gap`: so many bytes
    that nobody needs are read along rather than starting another read behind them. `longest`: a read of more bytes is better
    cut in two, which go on side by side.
    """

    size: int
    threads: int
    gap: int
    longest: int

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on; CorruptFile when they are not there."""


class Elsewhere(Protocol):
    """A file that is no path of this machine: `shown` is its name in messages."""

    @property
    def shown(self) -> str: ...

    def open(self) -> AbstractContextManager[Source]:
        """Its bytes, for the length of a block."""


Place = str | os.PathLike[str] | Elsewhere


class FileSource:
    """An open file descriptor of a regular file."""

    threads = 4
    gap = 32 << 10
    longest = 4 << 20

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    def read_into(self, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                got = os.preadv(self.fd, [out[done:]], offset + done)
            except OSError as error:
                raise UnreadableFile(
                    f"cannot be read: {error.strerror}",
                    where=f"file byte {offset + done}",
                    fix="check the disk, or copy the file elsewhere and try again",
                ) from error
            if got == 0:
                raise CorruptFile("the file became shorter while it was read", where=f"file byte {offset + done}")
            done += got


@contextmanager
def open_source(place: Place) -> Iterator[Source]:
    """Open a file for positioned reads; UnreadableFile says what stands there instead of a regular file."""
    if not isinstance(place, str | os.PathLike) and not hasattr(place, "open"):
        raise UnreadableFile("is no file name", fix="give a path such as book.kv")
    with _open_file(place) if isinstance(place, str | os.PathLike) else place.open() as source:
        yield source


@contextmanager
def _open_file(path: str | os.PathLike[str]) -> Iterator[FileSource]:
    """A regular file of this machine.

    O_NONBLOCK keeps the opening of a pipe or a device from waiting for its other end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError as error:
        raise UnreadableFile("no such file", fix="check the name") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableFile(f"cannot be opened: {reason}", fix="check the name and the permissions") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableFile(f"is {file_kind(status.st_mode)}, not a file", fix="give the name of a .kv file")
        yield FileSource(fd, status.st_size)
    finally:
        os.close(fd)


def file_kind(mode: int) -> str:
    """A word for what is not a regular file."""
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"
