"""DROPKV_* variables, completion at the Tab key, and the page that is made of the help texts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dropkv_cli._doc import commands, page
from dropkv_cli.variables import NEVER, long_name
from formats import read_header
from tests.cli.conftest import ROOT, Dropkv

PAGE = ROOT / "docs" / "commands.md"
ALL = [(path, option) for path, command in commands() for option in command.params if isinstance(option, click.Option)]


def test_a_variable_sets_a_default_and_an_option_wins_over_it(
    dropkv: Dropkv, document: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MODEL": str(model), "BUDGET": "48", "OBSERVE": "tail", "NO_TOKENS": "1", "WINDOW": ""}.items():
        monkeypatch.setenv(f"DROPKV_{name}", value)
    monkeypatch.setenv("DROPKV_COMPRESS_SYSTEM", "You are terse.")
    output = document.with_suffix(".kv")
    done = dropkv("compress", document, "-o", output)
    assert done.code == 0 and "note:" not in done.err
    metadata = read_header(output).metadata
    assert (metadata.budget.asked, metadata.observer["name"], metadata.tokenizer.system) == (
        48,
        "tail",
        "You are terse.",
    )
    assert metadata.observer["window"] == 8 and "tokens" not in read_header(output).tensors
    assert dropkv("compress", document, "-o", output, "--force", "--budget", "0.5").code == 0
    assert read_header(output).metadata.budget.asked == 0.5
    # What a file is asked with is its own model: only the variable of the command itself changes that.
    monkeypatch.setenv("DROPKV_MODEL", "/no/such/model")
    monkeypatch.setenv("DROPKV_QUERY_MODEL", str(model))
    monkeypatch.setenv("DROPKV_MAX_NEW_TOKENS", "3")
    monkeypatch.setenv("DROPKV_JSON", "true")
    (record,) = dropkv("query", output, "Which ship?").records
    assert 1 <= record["generated_tokens"] <= 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DROPKV_BUDGET", "5%", ["budget '5%' is no number", "(DROPKV_BUDGET is set to '5%')"]),
        ("DROPKV_WINDOW", "x", ["'--window' (env var: 'DROPKV_WINDOW')"]),
        ("DROPKV_WINDOW", "0", ["a window of 0", "(DROPKV_WINDOW is set to '0')"]),
        ("DROPKV_OBSERVE", "stars", ["unknown observer 'stars'", "(DROPKV_OBSERVE is set to 'stars')"]),
        ("DROPKV_METHOD", "foo", ["unknown method 'foo'", "(DROPKV_METHOD is set to 'foo')"]),
        ("DROPKV_DEVICE", "abacus", ["unknown device 'abacus'", "(DROPKV_DEVICE is set to 'abacus')"]),
        ("DROPKV_SEED", "-1", ["seed '-1'", "(DROPKV_SEED is set to '-1')"]),
        ("DROPKV_TRUNCATE", "maybe", ["'--truncate' (env var: 'DROPKV_TRUNCATE')"]),
    ],
)
def test_an_invalid_value_is_told_with_its_variable(
    dropkv: Dropkv, document: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    dropkv("compress", document, "-o", document.with_suffix(".kv")).failed_with(2, *words)


def test_a_misspelt_variable_is_told_once_with_the_nearest_name(
    dropkv: Dropkv, kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BUGDET", "QUERY_MODELL", "OUTPUT", "CACHE", "DEBUG", "BUDGET", "COMPRESS_SYSTEM"):
        monkeypatch.setenv(f"DROPKV_{name}", "")
    done = dropkv("info", kv, "--json")
    assert done.code == 0 and len(done.records) == 1
    assert done.err.splitlines() == [
        "note: the variable DROPKV_BUGDET means nothing to dropkv; did you mean DROPKV_BUDGET?",
        "note: the variable DROPKV_OUTPUT means nothing to dropkv; docs/commands.md and `--help` name those that do",
        "note: the variable DROPKV_QUERY_MODELL means nothing to dropkv; did you mean DROPKV_QUERY_MODEL?",
    ]
    monkeypatch.setenv("_DROPKV_COMPLETE", "bash_complete")
    assert "note:" not in dropkv("info", kv).err


def test_a_variable_that_an_option_overrules_is_not_blamed(
    dropkv: Dropkv, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPKV_BUDGET", "0.5")
    result = dropkv("compress", document, "-o", document.with_suffix(".kv"), "--budget=1.5")
    result.failed_with(2, "budget 1.5 is no fraction")
    assert "DROPKV_BUDGET" not in result.err
    monkeypatch.setenv("DROPKV_MODEL", "/no/such/model")
    missing = dropkv("compress", document, "-o", document.with_suffix(".kv"))
    missing.failed_with(1, "/no/such/model", "(DROPKV_MODEL is set to '/no/such/model')")


def test_every_option_has_a_variable_or_a_reason_to_have_none(dropkv: Dropkv) -> None:
    names: dict[str, set[str]] = {}
    for path, option in ALL:
        word = long_name(option)
        if word in NEVER or (path.startswith("bench") and word not in ("dtype", "device")):
            assert option.envvar is None, (path, word)
            continue
        own, shared = (f"DROPKV_{part}{word.replace('-', '_').upper()}" for part in (path.upper() + "_", ""))
        assert option.envvar in (own, shared), (path, word)
        names.setdefault(str(option.envvar), set()).add(word)
    assert all(len(words) == 1 for words in names.values())
    assert names.keys() >= {"DROPKV_MODEL", "DROPKV_BUDGET", "DROPKV_DEVICE", "DROPKV_QUERY_MODEL", "DROPKV_TOP_P"}
    assert "DROPKV_DEBUG" not in names and "DROPKV_CACHE" not in names
    shown = " ".join(dropkv("compress", "--help").out.split())
    assert "[env var: DROPKV_BUDGET; default: 0.25]" in shown


def test_the_page_of_the_commands_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: make docs"


def test_the_page_does_not_depend_on_variables_or_the_terminal() -> None:
    environment = os.environ | {"DROPKV_BUDGET": "7", "COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "dropkv_cli._doc"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == page()
    for path, option in ALL:
        section = re.split(r"^## ", done.stdout, flags=re.MULTILINE)
        (own,) = [part for part in section if part.startswith(f"dropkv {path}\n")]
        assert f"--{long_name(option)}" in own


def offered(*words: str) -> list[str]:
    """What bash is given for a command line whose last word is being typed."""
    environment = os.environ | {
        "COMP_WORDS": " ".join(["dropkv", *words]), "COMP_CWORD": str(len(words)), "_DROPKV_COMPLETE": "bash_complete",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    program = [sys.executable, "-m", "dropkv_cli"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    return done.stdout.split()


def test_words_are_completed() -> None:
    assert offered("comp") == ["plain,compress", "plain,completion"]
    assert offered("compress", "--meth") == ["plain,--method"]
    assert offered("compress", "--method", "adad") == ["plain,adadropkv"]
    assert offered("compress", "--observe", "q") == ["plain,question:", "plain,questions:"]
    assert offered("compress", "--model", "smol") == ["plain,smollm2-135m"]
    assert offered("query", "boo") == ["file,boo"]
    assert offered("completion", "z") == ["plain,zsh"]
    assert offered("verify", "a.kv", "--model", "smol") == ["plain,smollm2-135m"]


def test_lists_of_the_bench_are_completed_part_by_part() -> None:
    run = ("bench", "accuracy")
    assert offered(*run, "--tasks", "no") == ["plain,noise"]
    assert offered(*run, "--tasks", "all") == ["plain,all-needle", "plain,all-ruler", "plain,all-longbench"]
    assert offered(*run, "--tasks", "noise,four-k") == ["plain,noise,four-keys"]
    assert offered(*run, "--tasks", "noise,noi") == []
    assert offered(*run, "--methods", "full,no-") == ["plain,full,no-document"]
    assert offered(*run, "--methods", "adadrop") == ["plain,adadropkv"]
    assert offered(*run, "--observers", "") == ["plain,replay", "plain,tail"]
    assert offered(*run, "--settings", "question-free,q") == ["plain,question-free,question-aware"]
    assert offered(*run, "--model", "smol") == ["plain,smollm2-135m"]
    assert offered("bench", "theory", "book") == ["file,book"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_shells(dropkv: Dropkv, tmp_path: Path, shell: str) -> None:
    script = dropkv("completion", shell)
    assert script.code == 0 and f"_DROPKV_COMPLETE={shell}_complete" in script.out
    program = shutil.which(shell)
    if program is None:  # the text is checked above; the shell itself is not everywhere
        return
    (tmp_path / "script").write_text(script.out)
    check = [program, "-n", str(tmp_path / "script")]
    assert subprocess.run(check, capture_output=True, text=True).stderr == ""


def test_bash_completes_with_the_script(dropkv: Dropkv, tmp_path: Path) -> None:
    (tmp_path / "dropkv").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m dropkv_cli "$@"\n')
    (tmp_path / "dropkv").chmod(0o755)
    (tmp_path / "script").write_text(dropkv("completion", "bash").out)
    ask = "source ./script; COMP_WORDS=(dropkv query --max); COMP_CWORD=2; _dropkv_completion dropkv; echo ${COMPREPLY[*]}"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", ask], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    assert done.stdout == "--max-new-tokens\n"
