"""The study's lines as one small file, from which benchmarks/question_free/shares.py prints tables: every score, without the answers.

    python -m benchmarks.question_free.packed FOLDER [FOLDER ...] -o benchmarks/lines/NAME.json.gz --machine "one NVIDIA H200"
        --versions "torch 2.11, triton 3.6, transformers 5.17" --date YYYY-MM-DD [--model NAME]

FOLDER holds lines.jsonl or folders that do; --model names a model whose lines bear the name of a folder. The file is a gzip of one JSON object:
{"packed": "study 1", "model", "machine", "versions", "date", "groups"}. A group is a task, length and seed: `samples` and `questions` are lists of
one length, one entry a question; its `rows` are a method and budget with `scores` in that order (null where there is none) and the mean of
`kept_entries`. The same lines give the same bytes, in any order.
"""

from __future__ import annotations

import argparse
import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dropkv.bench.packed import WHERE, short_mean, short_score, squeezed, write_packed
from dropkv.bench.results import LINES, Line, key_of
from dropkv.errors import DropkvError, ResultsError, UsageError
from dropkv_cli.bench.lines import read_json_lines
from formats.errors import FormatError, show_path

PACKED = "study 1"
GROUP = ("task", "length", "seed")
ROW = ("method", "budget")


def lines_below(folder: Path) -> list[Line]:
    """The lines of a folder and of the folders in it. Raises ResultsError where there are none."""
    places = [place for place in (folder / LINES, *sorted(folder.glob(f"*/{LINES}"))) if place.exists()]
    found = [line for place in places for line in read_json_lines(place)]
    if not found:
        raise ResultsError(f"{show_path(folder)}: no {LINES} there or one folder below: name a folder of the study")
    return found


def pack(lines: Iterable[Line], where: Mapping[str, str], model: str | None = None) -> bytes:
    """Lines of one model as the bytes of a packed file; where: the values of WHERE; model: its name there, if another.

    Raises UsageError for no line at all, for lines of several models, and for two scores of one answer.
    """
    scores: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        known = scores.setdefault(key_of(line), line)
        if known["score"] != line["score"]:
            raise UsageError(
                f"{line['task']}, seed {line['seed']}, sample {line['sample']}, {line['method']}: measured twice with"
                " different answers: leave one of the folders out"
            )
    models = sorted({line["model"] for line in scores.values()})
    if len(models) != 1:
        raise UsageError(f"a packed file holds the lines of one model, not {', '.join(models) or 'no lines'}")
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in scores.values():
        groups[key_of(line, GROUP)][key_of(line, ROW)].append(line)
    return squeezed(
        {
            "packed": PACKED,
            "model": model or models[0],
            **{name: where[name] for name in WHERE},
            "groups": [_group(key, groups[key]) for key in sorted(groups)],
        }
    )


def _group(key: tuple[Any, ...], rows: Mapping[tuple[Any, ...], list[Line]]) -> dict[str, Any]:
    asked = sorted({(line["sample"], line["question"]) for own in rows.values() for line in own})
    return {
        **dict(zip(GROUP, key, strict=True)),
        "samples": [sample for sample, _ in asked],
        "questions": [question for _, question in asked],
        "rows": [_row(name, rows[name], asked) for name in sorted(rows)],
    }


def _row(name: tuple[Any, ...], lines: list[Line], asked: list[tuple[int, int]]) -> dict[str, Any]:
    scores = {(line["sample"], line["question"]): line["score"] for line in lines}
    return {
        **dict(zip(ROW, name, strict=True)),
        "kept_entries": short_mean([line["kept_entries"] for line in lines]),
        "scores": [short_score(scores.get(one)) for one in asked],
    }


def content_of(path: Path) -> dict[str, Any]:
    """What a packed file holds. Raises ResultsError for a file that cannot be read or is no file of this kind."""
    shown = show_path(path)
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError):
        raise ResultsError(f"{shown}: no packed lines of the study: pack its folders again") from None
    except OSError as error:
        raise ResultsError(f"{shown}: cannot be read ({error.strerror}): name a packed file of the study") from None
    if not isinstance(content, dict) or content.get("packed") != PACKED:
        raise ResultsError(f"{shown}: packed lines of another kind or version: name a packed file of the study")
    return content


def unpack(content: Mapping[str, Any]) -> Iterator[Line]:
    """The lines of what `content_of` read: model, task, length, seed, method, budget, sample, question, score."""
    for group in content["groups"]:
        common = {"model": content["model"]} | {name: group[name] for name in GROUP}
        for row in group["rows"]:
            for sample, question, score in zip(group["samples"], group["questions"], row["scores"], strict=True):
                if score is not None:
                    names = {"sample": sample, "question": question, "score": float(score)}
                    yield common | {name: row[name] for name in ROW} | names


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    options.add_argument("-o", "--output", required=True, type=Path)
    options.add_argument("--machine", required=True, help='such as "one NVIDIA H200"')
    options.add_argument("--versions", required=True, help='such as "torch 2.11, transformers 5.17"')
    options.add_argument("--date", required=True, help="YYYY-MM-DD")
    options.add_argument("--model", help="what the tables call the model")
    given = options.parse_args()
    try:
        lines = [line for folder in given.folders for line in lines_below(folder)]
        packed = pack(lines, {name: getattr(given, name) for name in WHERE}, given.model)
        write_packed(given.output, packed)
    except (DropkvError, FormatError) as error:
        options.exit(getattr(error, "exit_code", 1), f"{error}\n")
    print(f"{given.output}: {len(lines):,} lines, {len(packed):,} bytes")


if __name__ == "__main__":
    main()
