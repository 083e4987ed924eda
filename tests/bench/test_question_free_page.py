"""docs/question-free.md: its tables are what their commands print from the committed lines, and its names are the bench's and the library's."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import results_table
from benchmarks.question_free import after, shares
from benchmarks.question_free.recipes import groups
from benchmarks.question_free.shares import EVERY, names_of
from benchmarks.results_page import PENDING, commands_of, renewed, waits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "question-free.md").read_text(encoding="utf-8")
MAINS = {"-m benchmarks.question_free.shares": shares.main, "benchmarks/results_table.py": results_table.main}


def test_every_table_is_what_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)

    def printed(command: str) -> str:
        if waits(command, ROOT):
            return PENDING
        (script,) = (script for script in MAINS if command.startswith(f"python {script} "))
        monkeypatch.setattr(sys, "argv", shlex.split(command.removeprefix("python -m ").removeprefix("python ")))
        MAINS[script]()
        return capsys.readouterr().out

    assert len(commands_of(PAGE)) >= 15
    assert renewed(PAGE, printed) == PAGE, "python benchmarks/results_page.py docs/question-free.md"


def test_only_what_is_not_measured_is_pending() -> None:
    assert PAGE.count(PENDING) == sum(waits(command, ROOT) for command in commands_of(PAGE)) == PAGE.count("pending")


def test_a_command_waits_for_the_lines_that_it_names(tmp_path: Path) -> None:
    command = 'python -m benchmarks.question_free.shares benchmarks/lines/a.json.gz --recipes "b c"'
    assert waits(command, tmp_path) and not waits("python benchmarks/results_table.py other", tmp_path)
    (tmp_path / "benchmarks" / "lines").mkdir(parents=True)
    (tmp_path / "benchmarks" / "lines" / "a.json.gz").touch()
    assert not waits(command, tmp_path)


def test_figures_in_sentences_stand_in_the_tables() -> None:
    sentences = "\n".join(line for line in PAGE.splitlines() if not line.startswith(("|", "<!--")))
    tables = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    figures = re.findall(r"\b[01]\.\d{3}\b", sentences)
    assert len(figures) >= 7
    for figure in figures:
        assert re.search(rf"\| {re.escape(figure)} ", tables), figure


def test_recipes_are_the_benchs() -> None:
    known = {recipe.name for own in groups(24).values() for recipe in own} | set(after.NAMES)
    for command in commands_of(PAGE):
        words = shlex.split(command)
        if "--recipes" in words:
            assert set(names_of(words[words.index("--recipes") + 1])) - {EVERY} <= known, command
    sentences = re.sub(r"(?m)^(<!--|    ).*$", "", PAGE)
    for name in [name for name in re.findall(r'"([^"]+)"', sentences) if "%" in name or "," in name]:
        assert any(one.startswith(name) for one in known), name
