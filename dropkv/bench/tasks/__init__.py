"""The registry of tasks is the list of files in this folder: a file holds NAMES and make(name, data=, essay=)."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from dropkv.bench.plan import GROUPS
from dropkv.bench.tasks._base import Question, Sample, Task
from dropkv.errors import UsageError

__all__ = ["Question", "Sample", "Task", "get", "lacking", "names"]


def names() -> list[str]:
    """All tasks, in alphabetical order."""
    return sorted(name for family in _families() for name in family.NAMES)


def get(name: str, *, data: str | None = None, essay: str | None = None) -> Task:
    """The task of that name.

    data: folder of SQuAD's, HotpotQA's or LongBench's files, for the tasks that are made of them. essay: text file to
    take haystacks from in place of Python's help texts; the five needle tasks and those without prose do not look at it.
    Raises UsageError with the nearest names for an unknown task, and with what is missing where there is no data.
    """
    for family in _families():
        if name in family.NAMES:
            task: Task = family.make(name, data=data, essay=essay)
            return task
    raise UsageError(f"unknown task {name!r}: {_advice(name)}")


def lacking(chosen: Iterable[str], *, data: str | None = None, essay: str | None = None) -> dict[str, list[str]]:
    """The tasks of `chosen` that cannot run here, by what they lack. Raises UsageError for an unknown name."""
    known, found = names(), dict[str, list[str]]()
    for name in chosen:
        try:
            get(name, data=data, essay=essay)
        except UsageError as error:
            if name not in known:
                raise
            found.setdefault(str(error).removeprefix(f"{name}: "), []).append(name)
    return found


def _advice(name: str) -> str:
    """The names and groups that an unknown name may stand for."""
    every = [*GROUPS, *names()]
    inside = [one for one in every if len(name) > 2 and name.lower() in one]
    near = inside[:3] or difflib.get_close_matches(name.lower(), every, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "`dropkv bench tasks` lists them"


def _families() -> list[ModuleType]:
    files = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return [import_module(f"{__name__}.{file}") for file in files]
