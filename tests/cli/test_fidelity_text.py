"""The words for a file's fidelity, whatever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dropkv_cli.fidelity import CAVEAT, fidelity_lines, percent
from formats import read_header
from tests.cli.conftest import Dropkv

REPLAY = {"name": "replay", "chunk": 512}
VALUES = {"kept_information": 0.93, "nll": 1.25, "nll_full": 1.0, "right": 0.81, "right_full": 0.86}


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (1.004, "100 % of what the document tells the model is kept: as good as the full cache"),
        (0.9899, "98 % of what the document tells the model is kept: few facts are lost"),
        (0.998, "99 % of what the document tells the model is kept: as good as the full cache"),
        (0.8999, "89 % of what the document tells the model is kept: many facts are lost"),
        (0.9, "90 % of what the document tells the model is kept: few facts are lost"),
        (0.6, "60 % of what the document tells the model is kept: many facts are lost"),
        (0.2, "20 % of what the document tells the model is kept: most facts are lost"),
        (-0.3, "0 % of what the document tells the model is kept: most facts are lost"),
        (-7.0, "0 % of what the document tells the model is kept: most facts are lost"),
    ],
)
def test_a_share_has_a_plain_word(kept: float, words: str) -> None:
    assert fidelity_lines(VALUES | {"kept_information": kept}, REPLAY)[0].startswith(words)


def test_the_numbers_behind_it() -> None:
    numbers = "held-out tokens predicted right: 81 %, by the full cache 86 %; {} per token"
    assert fidelity_lines(VALUES, REPLAY)[1:] == [numbers.format("0.25 nats lost"), CAVEAT]
    assert fidelity_lines(VALUES | {"nll": 0.9}, REPLAY)[1:] == [numbers.format("0.10 nats won"), CAVEAT]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "not measured"),
        ({}, "not know"),
        ({"kl": 0.5}, "not know"),
        ({"kept_information": "much", "nll": True}, "not know"),
        (VALUES | {"kept_information": None}, "no use of the document"),
    ],
)
def test_what_another_version_wrote(values: dict[str, Any] | None, words: str) -> None:
    assert words in fidelity_lines(values, REPLAY)[0]


def test_it_says_what_it_is_no_measure_of() -> None:
    lines = fidelity_lines(VALUES, REPLAY)
    assert lines[2] == CAVEAT and "not whether the model can answer" in CAVEAT and len(lines) == 3
    assert CAVEAT not in fidelity_lines(VALUES | {"kept_information": None}, REPLAY)


@pytest.mark.parametrize(
    ("observer", "words"),
    [
        ({"name": "question", "window": 8, "text": "Who?"}, "one question"),
        ({"name": "questions", "count": 1, "file": "q.txt"}, "one question"),
        ({"name": "questions", "count": 1200, "file": "q.txt"}, "1,200 questions"),
        ({"name": "questions"}, "given questions"),
    ],
)
@pytest.mark.parametrize("kept", [1.0, 0.2])
def test_a_file_made_for_questions_gets_no_grade(observer: dict[str, Any], words: str, kept: float) -> None:
    lines = fidelity_lines(VALUES | {"kept_information": kept}, observer)
    assert lines[0] == f"{percent(kept)} of what the whole document tells the model is kept, chosen for {words} alone"
    assert lines[1].startswith("held-out tokens predicted right")
    assert lines[2:] == [
        "passages from all over it say nothing about that: ask, and compare with a file of --budget 1.0"
    ]


def test_compress_and_info_say_it(dropkv: Dropkv, document: Path, model: Path, tmp_path: Path) -> None:
    common = ("--model", model, "--budget", "0.5", "--chunk", "32")
    for observer, count in (("replay", 0), ("question:Which ship?", 1)):
        output = tmp_path / f"{count}.kv"
        made = dropkv("compress", document, "-o", output, *common, "--observe", observer)
        assert made.code == 0
        lines = fidelity_lines(read_header(output).metadata.fidelity, read_header(output).metadata.observer)
        assert "  fidelity: " + "\n    ".join(lines) + "\n" in made.err
        shown = dropkv("info", output).out.splitlines()
        start = next(index for index, line in enumerate(shown) if line.startswith("fidelity"))
        assert [line[11:].strip() for line in shown[start : start + len(lines)]] == lines
        assert any("chosen for one question" in line for line in lines) is bool(count)


def test_only_all_is_a_hundred_per_cent() -> None:
    assert [percent(share) for share in (1.0, 0.9999, 0.29, 0.0, 0.004, -0.2)] == [
        "100 %",
        "99 %",
        "29 %",
        "0 %",
        "0 %",
        "0 %",
    ]
