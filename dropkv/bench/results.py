"""Result lines on disk: one folder, JSON lines, finished cells are found again so that a run can go on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dropkv.errors import ResultsError

VERSION = 1
LINES = "lines.jsonl"
MACHINES = "machines.jsonl"  # beside them: what they were measured on, a line for each machine and its versions

Line = dict[str, Any]
Key = tuple[Any, ...]

KEY = ("model", "task", "length", "setting", "observer", "method", "budget", "seed", "sample", "question")


def key_of(line: Line, names: Sequence[str] = KEY) -> Key:
    """What makes a result line the only one of its kind: its values of these names."""
    return tuple(line.get(name) for name in names)


class Results:
    """Result lines in a file of a folder; key: the names of what makes a line the only one.

    Raises ResultsError for a folder of another version or with a damaged line that is not the last.
    """

    def __init__(self, folder: str | Path, name: str = LINES, key: Sequence[str] = KEY) -> None:
        self.path = Path(folder) / name
        self._key = key
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(f"{folder}: cannot hold results ({error.strerror}): name another folder") from None
        self.machine: Line | None = None  # what added lines are measured on, where that is to be kept
        self.done: set[Key] = set()
        whole = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                for number, raw in enumerate(file, 1):
                    line = self._parse(raw, number)
                    if line is None:
                        break  # the last line of a run that was stopped while writing it
                    whole += len(raw)
                    self.done.add(key_of(line, self._key))
            os.truncate(self.path, whole)

    def _parse(self, raw: bytes, number: int) -> Line | None:
        try:
            line = json.loads(raw)
        except ValueError:
            if raw.endswith(b"\n"):
                raise ResultsError(
                    f"{self.path}: line {number} is damaged: remove it, or name another folder"
                ) from None
            return None
        if not isinstance(line, dict) or line.get("version") != VERSION:
            raise ResultsError(f"{self.path}: line {number} is of another version: name another folder")
        return line if raw.endswith(b"\n") else None

    def add(self, lines: Iterable[Line]) -> None:
        """Append the lines that are not there yet; on disk when this returns."""
        fresh = [{"version": VERSION, **line} for line in lines if key_of(line, self._key) not in self.done]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in fresh)
            file.flush()
            os.fsync(file.fileno())
        self.done.update(key_of(line, self._key) for line in fresh)
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
        """All lines of the folder."""
        if self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                yield from map(json.loads, file)
