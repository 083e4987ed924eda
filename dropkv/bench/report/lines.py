"""Result lines as they are read back: checked, so that a report is never made of half-understood numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dropkv.errors import ResultsError

VERSION = 1
SETTINGS = ("question-aware", "question-free")


@dataclass(frozen=True)
class Result:
    """One finished question. budget: a fraction up to 1, entries per KV head above; kept_bytes of the document's cache; score in [0, 1]."""

    model: str
    task: str
    label: str
    length: int
    setting: str
    observer: str
    method: str
    budget: float
    seed: int
    sample: int
    question: int
    score: float
    prediction: str
    answers: tuple[str, ...]
    kept_entries: int
    full_entries: int
    kept_bytes: int
    document_tokens: int
    head_counts: tuple[tuple[int, ...], ...] | None
    depth: float | None


def read_lines(lines: Iterable[Mapping[str, Any]]) -> tuple[list[Result], list[Mapping[str, Any]]]:
    """Accuracy results, and theory lines as they are. Raises ResultsError naming the line for what is no result line of this version."""
    results: list[Result] = []
    theory: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not isinstance(line, Mapping):
            raise ResultsError(f"result line {number} is no JSON object: give the JSON lines that dropkv bench wrote")
        version = line.get("version")
        if version != VERSION:
            raise ResultsError(
                f"result line {number} has version {version!r}, this dropkv reads {VERSION}: run the bench again"
            )
        if line.get("kind") == "theory":
            theory.append(_theory(line, number))
        else:
            results.append(_result(line, number))
    return results, theory


def split_speed(lines: Iterable[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Lines of speed, of this version, and all others as they are."""
    every = list(lines)

    def of_speed(line: Any) -> bool:
        return isinstance(line, Mapping) and (line.get("kind"), line.get("version")) == ("speed", VERSION)

    return [line for line in every if of_speed(line)], [line for line in every if not of_speed(line)]


def _theory(line: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    _field(line, "table", str, number)
    return line


def _result(line: Mapping[str, Any], number: int) -> Result:
    def text(key: str) -> str:
        return str(_field(line, key, str, number))

    def whole(key: str) -> int:
        return int(_field(line, key, int, number))

    def real(key: str) -> float:
        return float(_field(line, key, (int, float), number))

    setting, score = text("setting"), real("score")
    if setting not in SETTINGS:
        raise ResultsError(
            f"result line {number} has the setting {setting!r}, not one of {', '.join(SETTINGS)}: run the bench again"
        )
    if not 0 <= score <= 1:
        raise ResultsError(f"result line {number} has the score {score}, not one from 0 to 1: run the bench again")
    counts, depth = line.get("head_counts"), line.get("depth")
    if counts is not None and not _is_grid(counts):
        raise ResultsError(
            f"result line {number}: head_counts is no list of whole numbers per layer: run the bench again"
        )
    return Result(
        model=text("model"),
        task=text("task"),
        label=text("label"),
        length=whole("length"),
        setting=setting,
        observer=text("observer"),
        method=text("method"),
        budget=real("budget"),
        seed=whole("seed"),
        sample=whole("sample"),
        question=whole("question"),
        score=score,
        prediction=text("prediction"),
        answers=tuple(str(answer) for answer in _field(line, "answers", list, number)),
        kept_entries=whole("kept_entries"),
        full_entries=whole("full_entries"),
        kept_bytes=whole("kept_bytes"),
        document_tokens=whole("document_tokens"),
        head_counts=None if counts is None else tuple(tuple(layer) for layer in counts),
        depth=None if depth is None else real("depth"),
    )


def _field(line: Mapping[str, Any], key: str, kind: type | tuple[type, ...], number: int) -> Any:
    value = line.get(key)
    if (
        not isinstance(value, kind)
        or isinstance(value, bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise ResultsError(
            f"result line {number}: {key} is {value!r:.60}, which is no result of this version: run the bench again"
        )
    return value


def _is_grid(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(layer, list) and all(isinstance(count, int) and not isinstance(count, bool) for count in layer)
        for layer in value
    )
