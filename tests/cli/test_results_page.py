"""docs/results.md: its tables are what their commands print from the committed lines, and the commands it gives a reader can be run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import results_table
from benchmarks.results_page import commands_of, renewed
from dropkv.bench.tasks.longbench import NAMES
from dropkv.errors import DropkvError
from tests.cli.conftest import ROOT, TEXT, Dropkv

PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_every_table_is_what_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)

    def printed(command: str) -> str:
        _, script, *arguments = shlex.split(command)
        assert script == "benchmarks/results_table.py"
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        results_table.main()
        return capsys.readouterr().out

    assert len(commands_of(PAGE)) >= 15
    assert renewed(PAGE, printed) == PAGE, "python benchmarks/results_page.py docs/results.md"


def test_figures_in_sentences_stand_in_the_tables() -> None:
    """The answer in the first lines, and the column "now" of the comparison with the first measurements."""
    short, _, rest = PAGE.partition("## What was measured")
    body = rest.partition("## Against the first")[0]
    for figure in re.findall(r"\d+\.\d(?!\d)", re.sub(r"`[^`]*`", "", short)):
        assert re.search(rf"\| {re.escape(figure)} ", body), figure
    compared = PAGE.partition("## Against the first")[2].partition("## Longer")[0]
    first, _, below = compared.partition("<details>")
    for row in re.findall(r"^\| .* \| .* \| (\d.*) \|$", first, re.M):
        values = row.split(" / ")
        assert any(
            [cell.partition(" ")[0] for cell in line.strip("| ").split(" | ")[-len(values) :]] == values
            for line in below.splitlines()
        ), row


def test_tables_end_at_an_empty_line() -> None:
    page = (
        "a\n<!-- python benchmarks/x.py 1 -->\nold\nold\n\nb\n<!-- python benchmarks/x.py 2 -->\n\n<!-- other -->\nc\n"
    )
    new = "a\n<!-- python benchmarks/x.py 1 -->\n<x.py 1>\n\nb\n<!-- python benchmarks/x.py 2 -->\n<x.py 2>\n\n<!-- other -->\nc\n"
    assert renewed(page, lambda command: f"<{command.removeprefix('python benchmarks/')}>\n") == new
    assert renewed(new, lambda command: f"<{command.removeprefix('python benchmarks/')}>\n") == new


COMMANDS = re.findall(r"^    dropkv (bench .*)$", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_the_commands_exist_and_mean_something(
    dropkv: Dropkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Everything that is checked before a model is loaded lets the command pass; the model is one that is not there."""
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "essays.txt"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "data").mkdir()
    for name in ("dev-v2.0.json", "hotpot_dev_distractor_v1.json", *(f"{name}.jsonl" for name in NAMES)):
        (tmp_path / "data" / name).write_text("")
    words = shlex.split(command)
    if "--shape" in words:
        monkeypatch.setattr("dropkv_cli.bench.speed.import_compiler", stop)
        dropkv(*words).failed_with(1, "all options are checked")
        return
    run = dropkv(*words, "--model", "/no/such/model")
    assert "skipped" not in run.err
    run.failed_with(1, "/no/such/model")


def stop() -> None:
    raise DropkvError("all options are checked")


def test_there_is_a_command_for_every_kind_of_table() -> None:
    kinds = {
        tuple(word for word in shlex.split(command) if word.startswith("all-") or word in ("niah", "theory", "speed"))
        for command in COMMANDS
    }
    assert kinds == {("all-ruler",), ("all-longbench",), ("niah",), ("theory",), ("speed",)}
