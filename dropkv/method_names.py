"""What methods there are, without importing them: that would import torch, too slow for `--help`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from dropkv.errors import UsageError

FOLDER = Path(__file__).with_name("methods")
HYPHENATED = {  # a module's name cannot have the hyphen
    "auto_told": "auto-told",
    "auto_twice": "auto-twice",
    "expected_attention": "expected-attention",
}


def method_files() -> dict[str, str]:
    """Name of every method -> name of its module in dropkv/methods."""
    stems = (path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    return {HYPHENATED.get(stem, stem): stem for stem in stems}


def method_file(name: str, others: Iterable[str] = ()) -> str:
    """The module of a method; UsageError with the nearest names, of `others` as well, where there is no such method."""
    files = method_files()
    if name in files:
        return files[name]
    known = sorted({*files, *others})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    advice = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known)}"
    raise UsageError(f"unknown method {name!r}: {advice}")
