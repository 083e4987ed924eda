"""A results folder: one run writes at a time, others read meanwhile, and no line counts twice."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dropkv.bench.packed import pack
from dropkv.bench.results import LINES, Results, made_folder, read_lines
from dropkv.errors import ResultsError
from dropkv_cli.bench.lines import SPEED, read_json_lines

WRITER = """
import sys
from dropkv.bench.results import Results
results = Results(sys.argv[1])
with results.writing():
    results.add([{"sample": 0}])
    print("writing", flush=True)
    sys.stdin.read()
"""


def samples(lines: object) -> list[int]:
    return [line["sample"] for line in lines]  # type: ignore[attr-defined]


def test_another_process_writes(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        other = Results(folder)
        assert samples(other.read()) == samples(read_json_lines(folder / LINES)) == [0]
        for attempt in (other.writing().__enter__, lambda: other.add([{"sample": 1}])):
            with pytest.raises(ResultsError) as refused:
                attempt()
            assert str(refused.value) == (
                f"another run writes into {folder}: wait until it has ended, or name another folder"
            )
        with Results(folder, "speed.jsonl").writing():  # another file of the folder
            pass
        process.kill()
    with other.writing():  # the lock died with its process
        other.add([{"sample": 0}, {"sample": 1}, {"sample": 1}])
    assert samples(map(json.loads, (folder / LINES).read_text().splitlines())) == [0, 1]


def test_what_others_wrote_since_the_first_look_is_not_written_again(tmp_path: Path) -> None:
    first, second = Results(tmp_path), Results(tmp_path)
    first.add([{"sample": 0}, {"sample": 1}])
    second.add([{"sample": 1}, {"sample": 2}])
    first.add([{"sample": 2}, {"sample": 3}])
    assert samples(first.read()) == samples(map(json.loads, (tmp_path / LINES).open())) == [0, 1, 2, 3]
    assert len(Results(tmp_path).done) == len(first.done) == 4


def test_doubles_of_older_runs_are_dropped_by_all_that_reads(tmp_path: Path) -> None:
    about = {"version": 1, "model": "m", "seed": 0, "task": "noise", "length": 9, "setting": "question-free"}
    about |= {"observer": "tail", "method": "tova", "budget": 0.5, "kept_entries": 1, "full_entries": 2}
    about |= {"kept_bytes": 3, "document_tokens": 9}
    lines = [about | {"sample": 0, "question": 0, "score": score} for score in (1.0, 0.0)]
    (tmp_path / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["score"] for line in Results(tmp_path).read()] == [1.0]
    assert [line["score"] for line in read_json_lines(tmp_path / LINES)] == [1.0]
    assert len(list(read_lines(tmp_path / LINES))) == 2
    where = {"machine": "a", "versions": "b", "date": "c"}
    assert pack(lines, where) == pack(lines[:1], where)
    speed = [{"version": 1, "length": 9, "budget": 0.5, "seconds": seconds} for seconds in (1, 2)]
    (tmp_path / SPEED).write_text("".join(json.dumps(line) + "\n" for line in speed))
    assert [line["seconds"] for line in read_json_lines(tmp_path / SPEED)] == [1]


def test_an_unfinished_line_is_cut_by_who_writes_and_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / LINES
    path.write_text('{"version": 1, "sample": 0}\n{"version": 1, "sam')
    results = Results(tmp_path)
    assert samples(results.read()) == samples(read_json_lines(path)) == [0]
    assert path.read_text().endswith('"sam')
    results.add([{"sample": 1}])
    assert path.read_text() == '{"version": 1, "sample": 0}\n{"version": 1, "sample": 1}\n'


def test_nothing_is_left_of_a_run_without_lines(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    results = Results(folder)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), results.writing():
        assert folder.is_dir()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with results.writing():
        results.add([])
    assert list(tmp_path.iterdir()) == []
    with made_folder(folder):
        (folder / "kept").touch()
    with made_folder(folder):
        pass
    assert (folder / "kept").exists()


def test_a_file_system_without_locks_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    one, two = Results(tmp_path), Results(tmp_path)
    with one.writing(), two.writing():
        one.add([{"sample": 0}])
        two.add([{"sample": 1}])
    assert samples(one.read()) == [0, 1]


def test_lines_that_were_removed_under_a_run_are_missed(tmp_path: Path) -> None:
    results = Results(tmp_path / "r")
    with pytest.raises(ResultsError, match=r"lines\.jsonl was removed while a run wrote into it"), results.writing():
        results.add([{"sample": 0}])
        (tmp_path / "r" / LINES).unlink()
        results.add([{"sample": 1}])
