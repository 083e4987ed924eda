"""A packed file holds every score: the tables printed from it are those of the folder it was packed from."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pack_lines, results_table
from dropkv.bench.packed import CELL, pack, unpack
from dropkv.bench.results import Results
from dropkv.errors import ResultsError, UsageError
from tests.bench.synthetic import accuracy_lines, line

WHERE = {"machine": "a machine", "versions": "torch 1", "date": "2026-01-01"}
NAMES = ("model", "seed", *CELL, "sample", "question", "score")


def some_lines() -> list[dict[str, Any]]:
    """Two settings, four tasks, and a task of two questions a document whose scores are no whole numbers."""
    own = [
        line(
            task="five",
            sample=sample,
            question=question,
            method=method,
            budget=budget,
            score=(sample + question) % 4 / 3,
        )
        for method in ("adadropkv", "dropkv")
        for budget in (0.05, 0.1, 0.25, 0.5)
        for sample in range(5)
        for question in range(2)
    ]
    return [*accuracy_lines(samples=12), *own]


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()


def test_every_score_comes_back_and_the_rest_as_means(tmp_path: Path) -> None:
    lines = some_lines()
    (tmp_path / "a.json.gz").write_bytes(pack(lines, WHERE))
    found = list(unpack(tmp_path / "a.json.gz"))

    def keys(some: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return sorted(tuple(one[name] for name in NAMES) for one in some)

    assert keys(found) == keys(lines)
    one = next(one for one in found if (one["task"], one["method"], one["budget"]) == ("vt", "adadropkv", 0.25))
    assert (one["kept_entries"], one["full_entries"], one["kept_bytes"]) == (1000, 4000, 5_750_000)
    mean = pack([line(kept_entries=1), line(sample=1, kept_entries=2)], WHERE)
    assert json.loads(gzip.decompress(mean))["cells"][0]["kept_entries"] == 1.5


def test_the_bytes_do_not_depend_on_the_order_of_lines_or_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = some_lines()
    first = pack(lines, WHERE)
    random.Random(0).shuffle(lines)
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert pack(lines, WHERE) == first
    content = json.loads(gzip.decompress(first))
    assert {name: value for name, value in content.items() if name != "cells"} == {
        "packed": 1,
        "model": "tiny",
        "seed": 42,
        "samples": 12,
        **WHERE,
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--setting", "question-free"),
        ("--setting", "question-aware", "--first", "dropkv,question", "--tasks", "vt,fwe"),
        ("--setting", "question-free", "--by-task", "0.25"),
        ("--setting", "question-free", "--better", "--first", "snapkv,replay"),
        ("--setting", "question-free", "--methods", "adadropkv,full", "--observers", "replay", "--length", "1024"),
    ],
)
def test_a_table_is_the_same_from_a_folder_and_from_a_packed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    lines = some_lines()
    random.Random(1).shuffle(lines)
    folder = write(tmp_path / "results", lines)
    packed = tmp_path / "lines.json.gz"
    told = [word for name, value in WHERE.items() for word in (f"--{name}", value)]
    run(pack_lines, monkeypatch, folder, "-o", packed, *told)
    assert f"{len(lines):,} lines" in capsys.readouterr().out
    tables = []
    for place in (folder, packed):
        run(results_table, monkeypatch, place, *options)
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and tables[0].count("\n") >= 1
    if "--by-task" not in options and "--better" not in options:
        assert "| method | 5 % | 10 % | 25 % | 50 % |" in tables[0]


def test_machines_say_where_and_options_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "results", [line()])
    packed = tmp_path / "lines.json.gz"
    with pytest.raises(SystemExit) as ended:
        run(pack_lines, monkeypatch, folder, "-o", packed, "--machine", "one")
    assert ended.value.code == 1 and "give --versions, --date" in capsys.readouterr().err and not packed.exists()
    for job, date in (("a", "2026-01-02"), ("b", "2026-01-01"), ("c", "2026-01-02")):
        (folder / job).mkdir()
        note = {
            "device": "NVIDIA H200",
            "dropkv": "0.1.0",
            "torch": "2.11",
            "triton": None,
            "transformers": "5.17",
            "date": date,
        }
        (folder / job / "machines.jsonl").write_text(json.dumps(note) + "\n")
    run(pack_lines, monkeypatch, folder, "-o", packed, "--machine", "one NVIDIA H200")
    content = json.loads(gzip.decompress(packed.read_bytes()))
    assert [content[name] for name in WHERE] == [
        "one NVIDIA H200",
        "dropkv 0.1.0, torch 2.11, transformers 5.17",
        "2026-01-01; 2026-01-02",
    ]


def test_a_folder_keeps_what_its_lines_were_measured_on(tmp_path: Path) -> None:
    def add(number: int, **machine: str) -> None:
        results = Results(tmp_path)
        results.machine = machine
        results.add([])
        results.add([line(sample=number)])
        results.add([line(sample=number + 1)])

    add(0, device="a", date="1")
    add(2, device="a", date="2")  # the same machine on another day
    add(4, device="b", date="2")
    found = [json.loads(one) for one in (tmp_path / "machines.jsonl").read_text().splitlines()]
    assert found == [{"device": "a", "date": "1"}, {"device": "b", "date": "2"}]


def test_what_cannot_be_packed_or_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="of one model and seed, not no lines"):
        pack([], WHERE)
    with pytest.raises(UsageError, match="other with seed 42, tiny with seed 42: pack a folder for each"):
        pack([line(), line(model="other")], WHERE)
    place = tmp_path / "a.json.gz"
    for content, words in (
        (b"PK not gzip", "no packed result lines"),
        (pack([line()], WHERE)[:-20], "no packed result lines"),
        (gzip.compress(b'{"packed": 2}'), "another version"),
        (gzip.compress(b'{"packed": 1, "model": "a"}'), "damaged"),
    ):
        place.write_bytes(content)
        with pytest.raises(ResultsError, match=words) as caught:
            list(unpack(place))
        assert "a.json.gz" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ResultsError, match="cannot be read"):
        list(unpack(tmp_path / "missing.json.gz"))
