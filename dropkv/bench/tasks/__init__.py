"""The registry of tasks is the list of files in this folder: a file holds NAMES and make(name, data=, essay=)."""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module
from types import ModuleType

from dropkv.bench.tasks._base import Question, Sample, Task
from dropkv.errors import UsageError

__all__ = ["Question", "Sample", "Task", "get", "names"]


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
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4) or names()
    raise UsageError(f"unknown task {name!r}: did you mean {' or '.join(near)}?")


def _families() -> list[ModuleType]:
    files = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return [import_module(f"{__name__}.{file}") for file in files]
