"""Result lines in a small file: every score, without the answers and the budgets of heads, so that it can stand beside the tables made of it.

A gzip file of one JSON object: {"packed": 1, "model", "seed", "samples" (documents of a task at most), "machine", "versions", "date", "cells"}. A
cell is a task, length, setting, observer, method and budget: `samples`, `questions` and `scores` are lists of one length, one entry an answer;
`kept_entries`, `full_entries`, `kept_bytes` and `document_tokens` are means over them. The same lines give the same bytes, in whatever order.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dropkv.bench.results import Line, key_of
from dropkv.errors import ResultsError, UsageError
from formats.errors import naming, show_path
from formats.temporary import replacing

PACKED = 1
SUFFIX = ".json.gz"
CELL = ("task", "length", "setting", "observer", "method", "budget")
MEANS = ("kept_entries", "full_entries", "kept_bytes", "document_tokens")
WHERE = ("machine", "versions", "date")


def pack(lines: Iterable[Line], where: Mapping[str, Any]) -> bytes:
    """Lines of one model and seed as the bytes of a packed file; where: the values of WHERE.

    Raises UsageError for no line at all, and for lines of several models or seeds.
    """
    cells: dict[tuple[Any, ...], list[Line]] = {}
    runs, documents = set(), set()
    for line in {key_of(line): line for line in reversed(list(lines))}.values():  # of doubles the first
        runs.add((line["model"], line["seed"]))
        documents.add((line["task"], line["length"], line["sample"]))
        cells.setdefault(tuple(line[name] for name in CELL), []).append(line)
    if len(runs) != 1:
        found = ", ".join(f"{model} with seed {seed}" for model, seed in sorted(runs)) or "no lines"
        raise UsageError(f"a packed file holds the lines of one model and seed, not {found}: pack a folder for each")
    ((model, seed),) = runs
    content = {
        "packed": PACKED,
        "model": model,
        "seed": seed,
        "samples": max(Counter((task, length) for task, length, _ in documents).values()),
        **{name: where[name] for name in WHERE},
        "cells": [_cell(key, cells[key]) for key in sorted(cells)],
    }
    return squeezed(content)


def squeezed(content: Mapping[str, Any]) -> bytes:
    """The bytes of a packed file; equal contents, equal bytes."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    file = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=9, mtime=0) as packed:
        packed.write(text.encode("utf-8", "replace"))
    return file.getvalue()


def write_packed(path: Path, packed: bytes) -> None:
    """Write a packed file, whole or not at all, in place of what is there. Raises FormatError."""
    with naming(path), replacing(path, overwrite=True) as target, open(target, "wb", closefd=False) as file:
        file.write(packed)


def short_score(score: float | None) -> float | None:
    """A score as it is written: right and wrong as 1 and 0."""
    return int(score) if score is not None and score in (0, 1) else score


def short_mean(numbers: Collection[float]) -> float:
    """The mean as it is written: three places at most."""
    mean = math.fsum(numbers) / len(numbers)
    return int(mean) if mean.is_integer() else round(mean, 3)


def _cell(key: tuple[Any, ...], lines: list[Line]) -> dict[str, Any]:
    ordered = sorted(lines, key=lambda line: (line["sample"], line["question"]))
    return {
        **dict(zip(CELL, key, strict=True)),
        **{name: short_mean([line[name] for line in lines]) for name in MEANS},
        "samples": [line["sample"] for line in ordered],
        "questions": [line["question"] for line in ordered],
        "scores": [short_score(line["score"]) for line in ordered],
    }


def unpack(path: str | Path) -> Iterator[Line]:
    """The lines of a packed file, as far as it holds them: model, seed, cell, sample, question, score, and the means of the cell.

    Raises ResultsError for a file that cannot be read, is no packed file, damaged, or of another version.
    """
    content = header(path)
    try:
        for cell in content["cells"]:
            common = {"model": content["model"], "seed": content["seed"]}
            common |= {name: cell[name] for name in (*CELL, *MEANS)}
            for sample, question, score in zip(cell["samples"], cell["questions"], cell["scores"], strict=True):
                yield common | {"sample": sample, "question": question, "score": float(score)}
    except (KeyError, TypeError, ValueError):
        raise ResultsError(f"{show_path(path)}: a damaged packed file: pack the results folder again") from None


def header(path: str | Path) -> dict[str, Any]:
    """The whole content of a packed file. Raises what `unpack` raises."""
    shown = show_path(path)
    try:
        content = json.loads(gzip.decompress(Path(path).read_bytes()))
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError):
        raise ResultsError(
            f"{shown}: no packed result lines: name a results folder or a file of pack_lines.py"
        ) from None
    except OSError as error:
        raise ResultsError(
            f"{shown}: cannot be read ({error.strerror}): name a results folder or a packed file"
        ) from None
    if not isinstance(content, dict) or content.get("packed") != PACKED:
        raise ResultsError(f"{shown}: packed lines of another version: pack the results folder again")
    return content
