"""With --json, a failure too is a line of JSON on standard output; standard error and exit code are as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SETTINGS, Dropkv


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["info", "no.kv"], {"file": "no.kv", "exit": 1}),
        (["verify", "no.kv"], {"file": "no.kv", "exit": 1}),
        (["query", "no.kv", "who?"], {"file": "no.kv", "question": "who?", "exit": 1}),
        (["query", "no.kv"], {"file": "no.kv", "exit": 2}),
        (["query", "no.kv", "who?", "--budget", "much"], {"file": "no.kv", "question": "who?", "exit": 2}),
        (["query", "no.kv", "--nonsense"], {"file": "no.kv", "exit": 2}),
        (["compress", "no.txt", "-o", "a.kv"], {"file": "a.kv", "document": "no.txt", "exit": 1}),
        (["compress", "no.txt", "-o", "./"], {"file": "no.kv", "document": "no.txt", "exit": 1}),
        (["compress", "no.txt"], {"file": None, "document": "no.txt", "exit": 2}),
        (["compress"], {"exit": 2}),
        (["shrink", "no.kv", "-o", "a.kv", "--budget", "9"], {"file": "a.kv", "source": "no.kv", "exit": 1}),
        (["push", "no.kv", "me/books"], {"file": "no.kv", "repository": "me/books", "exit": 1}),
        (["pull", "books"], {"address": "books", "exit": 2}),
        (["bench", "theory", "no.txt"], {"document": "no.txt", "exit": 1}),
    ],
)
def test_a_failure_is_a_line_of_json(
    dropkv: Dropkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], names: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, told = dropkv(*arguments), dropkv(*arguments, "--json")
    plain.failed_with(names["exit"])
    assert (told.code, told.err) == (plain.code, plain.err)
    assert told.records == [names | {"error": plain.err.removeprefix("dropkv: ").rstrip("\n")}]
    if arguments[0] != "bench":  # which takes no variables
        monkeypatch.setenv("DROPKV_JSON", "1")
        assert dropkv(*arguments).records == told.records


def test_a_command_without_json_prints_none(dropkv: Dropkv) -> None:
    dropkv("completion", "csh", "--json").failed_with(2)
    dropkv("bench", "nothing", "--json").failed_with(2)
    dropkv("nothing", "--json").failed_with(2)
    dropkv("info", "no.kv", "--", "--json").failed_with(2)  # --json is an argument there


def test_one_of_several_documents(dropkv: Dropkv, document: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    texts = (tmp_path / "empty.txt", document)
    made = dropkv("compress", *texts, "-o", tmp_path, "--model", model, "--no-fidelity", *SETTINGS, "--json")
    bad, good = made.records
    assert made.code == 1 and "error" not in good and good["document"] == str(document)
    assert bad == {
        "file": str(tmp_path / "empty.kv"),
        "document": str(texts[0]),
        "error": f"{texts[0]}: is empty; give a document with text in it",
        "exit": 1,
    }


def test_questions_of_which_one_is_none(dropkv: Dropkv, kv: Path, model: Path) -> None:
    asked = dropkv("query", kv, "who?", " ", "--model", model, "--max-new-tokens", "2", "--json")
    bad, good = asked.records
    assert asked.code == 1 and good["question"] == "who?" and "exit" not in good
    assert (bad["question"], bad["exit"]) == (" ", 1) and bad["error"].startswith("question 2: ")


def test_a_damaged_file(dropkv: Dropkv, kv: Path) -> None:
    content = bytearray(kv.read_bytes())
    content[-1] ^= 1
    kv.write_bytes(content)
    plain = dropkv("verify", kv)
    [record] = dropkv("verify", kv, "--json").records
    assert record == {"file": str(kv), "error": plain.err.removeprefix("dropkv: ").strip(), "exit": 1}
