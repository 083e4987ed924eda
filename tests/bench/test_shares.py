"""The study's packed lines and the table made of them, on scores whose shares and intervals can be worked out by hand."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.question_free import packed, shares
from benchmarks.question_free.packed import content_of, lines_below, pack, unpack
from benchmarks.question_free.shares import names_of, study_of
from dropkv.bench.stats import wilson
from dropkv.errors import ResultsError, UsageError

WHERE = {"machine": "a machine", "versions": "torch 1", "date": "2026-01-01"}
NAMES = ("model", "task", "length", "seed", "method", "budget", "sample", "question", "score")


def line(method: str, score: float, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "version": 1,
        "model": "tiny",
        "task": "noise",
        "length": 100,
        "setting": "question-free",
        "observer": "replay",
        "method": method,
        "budget": 1.0 if method == "full" else 0.1,
        "seed": 3,
        "sample": 0,
        "question": 0,
        "score": score,
        "prediction": "7",
        "kept_entries": 10,
    }
    return base | changes


def row(method: str, scores: list[float], **changes: Any) -> list[dict[str, Any]]:
    """One question of each document, in their order."""
    return [line(method, score, sample=sample, **changes) for sample, score in enumerate(scores)]


def printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: list[dict[str, Any]],
    *options: str,
) -> list[str]:
    place = tmp_path / "lines.json.gz"
    place.write_bytes(pack(lines, WHERE))
    monkeypatch.setattr(sys, "argv", ["shares", str(place), *options])
    shares.main()
    return capsys.readouterr().out.splitlines()


def test_shares_and_differences_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full cache: 8 of 10. "good" answers what it does, the default nothing: a share of 1, and 0.8 of 0.8 more. Where every pair differs alike,
    the interval is Wilson's."""
    full = [1.0] * 8 + [0.0] * 2
    lines = row("full", full) + row("good", full) + row("default", [0.0] * 10) + row("half", [1.0] * 4 + [0.0] * 6)
    out = printed(tmp_path, monkeypatch, capsys, lines, "--recipes", "good=auto;default")
    assert out[:2] == ["| recipe | mean | 10 % |", "|---|---|---|"]
    name, mean, ten = out[2].strip("| ").split(" | ")
    assert (name, mean) == ("auto", "1.000") and ten.startswith("1.000 (+1.00, ")
    assert out[3] == "| default | 0.000 | 0.000 |"
    low, high = (100 * value for value in wilson(8, 10))
    assert out[4:] == [
        f"* Full cache: noise 80.0 % ({low:.1f} to {high:.1f}).",
        "* Documents: 10 of noise; seed 3; tiny, a machine, torch 1, 2026-01-01.",
    ]
    every = printed(tmp_path, monkeypatch, capsys, lines)
    assert [one.split(" | ")[:2] for one in every[2:5]] == [
        ["| good", "1.000"],
        ["| half", "0.500"],
        ["| default", "0.000"],
    ]
    points = printed(tmp_path, monkeypatch, capsys, lines, "--recipes", "half;default", "--points")
    assert points[2].startswith("| half | 40.0 | 40.0 (+40.0, +10.0 to +70.0)")  # of 10 documents 4 differ
    assert points[3] == "| default | 0.0 | 0.0 |"


def test_an_interval_where_all_pairs_differ_alike_is_wilsons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = row("full", [1.0] * 20) + row("good", [1.0] * 20) + row("default", [0.0] * 20)
    out = printed(tmp_path, monkeypatch, capsys, lines)
    least = wilson(20, 20)[0]
    assert out[2] == f"| good | 1.000 | 1.000 (+1.00, +{least:.2f} to +1.00) |"
    unseen = wilson(0, 20)[1]
    against = printed(tmp_path, monkeypatch, capsys, lines, "--against", "full", "--targets", "0.85")
    assert against[2:4] == [
        "| to reach |  | 0.85 |",
        f"| good | 1.000 | 1.000 ({1 - unseen:.2f} to {1 + unseen:.2f}) |",
    ]


def test_every_seed_adds_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sample 0 of one seed is not sample 0 of another: ten of three seeds are thirty pairs, and the intervals are those of thirty."""
    lines = []
    for seed in (5, 3, 4):
        lines += row("full", [1.0] * 10, seed=seed) + row("default", [0.0] * 10, seed=seed)
        lines += row("good", [1.0] * (10 if seed == 3 else 5) + [0.0] * (0 if seed == 3 else 5), seed=seed)
    out = printed(tmp_path, monkeypatch, capsys, lines)
    assert out[2].startswith("| good | 0.667 | 0.667 (+0.67, ")
    assert out[3] == "| default | 0.000 | 0.000 |"
    assert out[-1].startswith("* Documents: 30 of noise; seeds 3, 4, 5; tiny,")
    # the spread of a share of 2/3 among 30 documents, from a bootstrap: 1.96 standard errors of sqrt(2/9/30)
    low, high = (float(value) for value in out[2].split(", ")[1].split(")")[0].split(" to "))
    assert low == pytest.approx(0.667 - 1.96 * (2 / 9 / 30) ** 0.5, abs=0.02)
    assert high == pytest.approx(0.667 + 1.96 * (2 / 9 / 30) ** 0.5, abs=0.02)


def test_questions_of_a_document_are_resampled_together() -> None:
    """Four documents with five questions each, all of a document alike: the interval is that of four documents, not of twenty."""
    lines = [
        line(method, score, sample=sample, question=question)
        for method, right in (("full", 4), ("good", 2), ("default", 0))
        for sample in range(4)
        for question in range(5)
        for score in [float(sample < right)]
    ]
    study = study_of(lines, [], [], names_of("*"))
    many, base = study.rows["good"][0.1], study.rows["default"][0.1]
    shown = shares.cell(study, many, base, True)
    assert shown == "50.0 (+50.0, +0.0 to +100.0)"  # 2 of 4 drawn with replacement: none or all in 1 of 16 draws each
    few = study_of([one for one in lines if one["question"] == 0], [], [], names_of("*"))
    assert shares.cell(few, few.rows["good"][0.1], few.rows["default"][0.1], True) == shown


def test_the_mean_is_that_of_tasks_and_tasks_can_stand_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """noise: 40 of 40; prose: 5 of the full cache's 10 of 20. The mean of tasks is 62.5 of 75, whatever their sizes."""
    lines = row("full", [1.0] * 40) + row("default", [1.0] * 40)
    lines += row("full", [1.0] * 10 + [0.0] * 10, task="prose") + row("default", [1.0] * 5 + [0.0] * 15, task="prose")
    out = printed(tmp_path, monkeypatch, capsys, lines, "--tasks", "prose,noise")
    assert out[2] == f"| default | {62.5 / 75:.3f} | {62.5 / 75:.3f} |"
    assert (
        out[3].startswith("* Full cache: 75.0 % (") and ": prose 50.0 % (" in out[3] and ", noise 100.0 % (" in out[3]
    )
    assert "* Documents: 20 of prose, 40 of noise; seed 3;" in out[4]
    alone = printed(tmp_path, monkeypatch, capsys, lines, "--tasks", "prose,noise", "--by-task", "--targets", "0.9")
    assert alone[:5] == [
        "| task | recipe | mean | 10 % |",
        "|---|---|---|---|",
        "| to reach |  |  | 0.90 |",
        "| prose | default | 0.500 | 0.500 |",
        "| noise | default | 1.000 | 1.000 |",
    ]
    lengths = row("full", [1.0] * 2) + row("default", [1.0] * 2) + row("full", [1.0] * 2, length=4096)
    lengths += row("default", [0.0] * 2, length=4096)
    both = printed(tmp_path, monkeypatch, capsys, lengths, "--by-task")
    assert both[2:4] == ["| noise at 100 | default | 1.000 | 1.000 |", "| noise at 4,096 | default | 0.000 | 0.000 |"]
    one = printed(tmp_path, monkeypatch, capsys, lengths, "--lengths", "4096", "--by-task")
    assert one[2] == "| noise | default | 0.000 | 0.000 |"
    budgets = row("full", [1.0] * 2) + row("default", [1.0] * 2) + row("default", [0.0] * 2, budget=0.25)
    assert printed(tmp_path, monkeypatch, capsys, budgets, "--budgets", "0.25")[:3:2] == [
        "| recipe | mean | 25 % |",
        "| default | 0.000 | 0.000 |",
    ]


def test_written_documents_count_once_and_fewer_documents_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [one for seed in (3, 4) for one in row("full", [1.0] * 8, task="written", seed=seed)]
    lines += [one for seed in (3, 4) for one in row("default", [1.0] * 4 + [0.0] * 4, task="written", seed=seed)]
    lines += row("good", [1.0] * 3 + [0.0], task="written")
    out = printed(tmp_path, monkeypatch, capsys, lines)
    assert out[-1] == "* Documents: 8 of written; tiny, a machine, torch 1, 2026-01-01."
    assert out[2].startswith("| good (of 4 documents) | 0.750 | 0.750 (-0.25, ")
    assert out[3] == "| default | 0.500 | 0.500 |"


def test_better_lists_what_is_ahead_beyond_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = row("full", [1.0] * 20)
    for budget in (0.1, 0.25):
        lines += row("default", [1.0] * 5 + [0.0] * 15, budget=budget)
        lines += row("good", [1.0] * (20 if budget == 0.1 else 6) + [0.0] * (0 if budget == 0.1 else 14), budget=budget)
    assert printed(tmp_path, monkeypatch, capsys, lines, "--better") == ["* noise, 10 % (first row 25.0): good +75.0"]
    none = printed(tmp_path, monkeypatch, capsys, lines, "--better", "--against", "good")
    assert none == ["* none"]


def test_packing_keeps_every_score_in_any_order(tmp_path: Path) -> None:
    lines = row("full", [1.0, 0.5, 1 / 3]) + row("good", [1.0, 0.0], seed=4) + row("good", [0.25] * 3, kept_entries=7)
    lines += [*row("full", [1.0, 1.0], seed=4), line("good", 1.0, sample=2, seed=4, question=3, kept_entries=11)]
    first = pack(lines, WHERE, "a model")
    random.Random(0).shuffle(lines)
    assert pack(lines, WHERE, "a model") == first == pack(lines + lines, WHERE, "a model")
    (tmp_path / "a").write_bytes(first)
    found = list(unpack(content_of(tmp_path / "a")))
    assert sorted(tuple(one[name] for name in NAMES[1:]) for one in found) == sorted(
        tuple(one[name] for name in NAMES[1:]) for one in lines
    )
    content = json.loads(gzip.decompress(first))
    assert (content["model"], content["machine"]) == ("a model", "a machine")
    kept = {(group["seed"], own["method"]): own["kept_entries"] for group in content["groups"] for own in group["rows"]}
    assert kept == {(3, "full"): 10, (3, "good"): 7, (4, "full"): 10, (4, "good"): 10.333}


def test_folders_are_packed_with_those_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, lines in (("a/x", row("full", [1.0])), ("a/y", row("good", [1.0])), ("b", row("full", [0.0], seed=4))):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert len(lines_below(tmp_path / "a")) == 2
    output = tmp_path / "out.json.gz"
    told = [word for name, value in WHERE.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["packed", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(output), *told])
    packed.main()
    assert ": 3 lines, " in capsys.readouterr().out
    assert [(one["seed"], one["method"]) for one in unpack(content_of(output))] == [
        (3, "full"),
        (3, "good"),
        (4, "full"),
    ]
    monkeypatch.setattr(sys, "argv", ["packed", str(tmp_path), "-o", str(output), *told])
    (tmp_path / "b" / "lines.jsonl").unlink()
    with pytest.raises(SystemExit) as ended:
        packed.main()
    assert ended.value.code == 1 and "no lines.jsonl there" in capsys.readouterr().err


def test_what_cannot_be_packed_read_or_chosen_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="of one model, not no lines"):
        pack([], WHERE)
    with pytest.raises(UsageError, match="of one model, not other, tiny"):
        pack([line("full", 1.0), line("full", 1.0, model="other")], WHERE)
    with pytest.raises(UsageError, match="noise, seed 3, sample 0, full: measured twice with different answers"):
        pack([line("full", 1.0), line("full", 0.0)], WHERE)
    for content, words in (
        (b"PK not gzip", "no packed lines of the study"),
        (pack([line("full", 1.0)], WHERE)[:-9], "no packed lines of the study"),
        (gzip.compress(b'{"packed": 1}'), "another kind or version"),
    ):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ResultsError, match=words):
            content_of(tmp_path / "a")
    with pytest.raises(ResultsError, match="cannot be read"):
        content_of(tmp_path / "missing")
    lines = row("full", [1.0]) + row("default", [1.0])
    for options, words in (
        (["--tasks", "prose"], "no lines of the task prose"),
        (["--recipes", "goood;default"], "no lines of the recipe 'goood'"),
        (["--against", "good"], "no row 'good' that was chosen"),
        (["--targets", "0.1,0.2"], "one for each of the 1 budgets"),
    ):
        with pytest.raises(SystemExit) as ended:
            printed(tmp_path, monkeypatch, capsys, lines, *options)
        assert ended.value.code == UsageError.exit_code
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1
    with pytest.raises(ResultsError, match="no lines of the full cache"):
        study_of(row("default", [1.0]), [], [], names_of("*"))
