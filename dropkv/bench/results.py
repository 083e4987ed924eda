"""Result lines on disk: one folder, JSON lines, finished cells are found again so that a run can go on where it stopped.

Whoever writes holds a lock on the file, which the system takes back when the process dies; reading is possible all the while.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dropkv.errors import ResultsError
from formats.errors import show_path

VERSION = 1
LINES = "lines.jsonl"
MACHINES = "machines.jsonl"  # beside them: what they were measured on, a line for each machine and its versions

Line = dict[str, Any]
Key = tuple[Any, ...]

KEY = ("model", "task", "length", "setting", "observer", "method", "budget", "seed", "sample", "question")


def key_of(line: Line, names: Sequence[str] = KEY) -> Key:
    """What makes a result line the only one of its kind: its values of these names."""
    return tuple(line.get(name) for name in names)


def read_lines(path: str | Path, key: Sequence[str] | None = None) -> Iterator[Line]:
    """The finished lines of a file, none where there is no file; of lines of one key (names as in `key_of`) the first.

    Raises ResultsError naming the line that is damaged or of another version.
    """
    seen: set[Key] = set()
    for line, _ in _lines(Path(path)):
        if key is not None:
            own = key_of(line, key)
            if own in seen:
                continue
            seen.add(own)
        yield line


def _lines(path: Path, start: int = 0, before: int = 0) -> Iterator[tuple[Line, int]]:
    """Lines with their lengths in bytes, from a byte on that `before` lines stand before. A last line that is being written, or was never
    finished, is passed over."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ResultsError(f"{show_path(path)}: cannot be read ({error.strerror}): name another folder") from None
    with file:
        file.seek(start)
        for number, raw in enumerate(file, before + 1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = json.loads(raw)
            except ValueError:
                raise ResultsError(
                    f"{show_path(path)}: line {number} is damaged: remove it, or name another folder"
                ) from None
            if not isinstance(line, dict) or line.get("version") != VERSION:
                raise ResultsError(f"{show_path(path)}: line {number} is of another version: name another folder")
            yield line, len(raw)


@contextlib.contextmanager
def made_folder(folder: str | Path) -> Iterator[None]:
    """A folder for the length of the block, and after it if something lies in it then. Raises ResultsError."""
    path = Path(folder)
    made = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(
                f"{show_path(path)}: cannot hold results ({error.strerror}): name another folder"
            ) from None
        yield
    finally:
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for place in made:
                place.rmdir()


class Results:
    """Result lines in a file of a folder; key: the names of what makes a line the only one. Nothing is touched before `writing`.

    Raises ResultsError for a folder of another version or with a damaged line that is not the last.
    """

    def __init__(self, folder: str | Path, name: str = LINES, key: Sequence[str] = KEY) -> None:
        self.path = Path(folder) / name
        self._key = key
        self.machine: Line | None = None  # what added lines are measured on, where that is to be kept
        self.done: set[Key] = set()
        self._count = self._size = 0  # lines that `done` knows, and their bytes
        self._file: BinaryIO | None = None
        self._catch_up()

    def _catch_up(self) -> None:
        """Learn of the lines that have come since the last look."""
        if self._size and (not self.path.exists() or self.path.stat().st_size < self._size):
            self.done, self._count, self._size = set(), 0, 0  # another file stands there now
        for line, size in _lines(self.path, self._size, self._count):
            self.done.add(key_of(line, self._key))
            self._count += 1
            self._size += size

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only one that writes, for the length of the block; within another such block nothing changes.

        Lines that others have written by then are known. A file or folder that was made for it goes again if no line came. Raises
        ResultsError when another run writes there, or when it cannot be written. File systems without locks refuse nobody.
        """
        if self._file is not None:
            yield
            return
        with made_folder(self.path.parent), self._open() as file:
            self._file = file
            try:
                self._catch_up()
                if os.fstat(file.fileno()).st_size > self._size:
                    file.truncate(self._size)  # the last line of a run that was stopped while writing it
                yield
            finally:
                self._file = None
                if not os.fstat(file.fileno()).st_size:
                    self.path.unlink(missing_ok=True)  # while it is locked, so that nobody has begun to write there

    def _open(self) -> BinaryIO:
        """The file to append to, locked."""
        folder = show_path(self.path.parent)
        while True:
            try:
                file = self.path.open("ab")
            except OSError as error:
                raise ResultsError(f"{folder}: cannot hold results ({error.strerror}): name another folder") from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.close()
                raise ResultsError(
                    f"another run writes into {folder}: wait until it has ended, or name another folder"
                ) from None
            except OSError:
                return file  # no locks on this file system
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # removed between opening and locking, by one that had nothing to write

    def add(self, lines: Iterable[Line]) -> None:
        """Append the lines that are not there yet; on disk when this returns. Raises ResultsError as `writing` does."""
        lines = list(lines)
        if not lines:
            return
        with self.writing():
            assert self._file is not None
            if not os.fstat(self._file.fileno()).st_nlink:
                raise ResultsError(f"{show_path(self.path)} was removed while a run wrote into it: start the run again")
            fresh: dict[Key, Line] = {}
            for line in lines:
                if (own := key_of(line, self._key)) not in self.done:
                    fresh.setdefault(own, {"version": VERSION, **line})
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in fresh.values()).encode("utf-8")
            self._file.write(text)
            self._file.flush()
            os.fsync(self._file.fileno())
            self.done.update(fresh)
            self._count += len(fresh)
            self._size += len(text)
            if self.machine is not None and fresh:
                self._note(self.machine)
                self.machine = None

    def _note(self, machine: Line) -> None:
        """Keep what lines were measured on, unless it is known but for the date."""
        path = self.path.with_name(MACHINES)
        known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if not any(json.loads(line) == machine | {"date": json.loads(line).get("date")} for line in known):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(machine, ensure_ascii=False) + "\n")

    def read(self) -> Iterator[Line]:
        """All lines of the folder, each key once."""
        return read_lines(self.path, self._key)
