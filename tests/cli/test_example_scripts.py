"""The scripts in examples/: the tour runs from top to bottom, the little server answers for every file of a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dropkv
from examples.serve_folder import Shelf, make_server
from tests.cli.conftest import ROOT, SETTINGS, TEXT, run_dropkv


@pytest.fixture(scope="module")
def shelf(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server for a folder of two files."""
    folder = tmp_path_factory.mktemp("shelf")
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(f"Number {name}. {TEXT}")
    done = run_dropkv("compress", folder, "-o", folder, "--model", model, *SETTINGS)
    assert done.code == 0, done.err
    server = make_server(Shelf(folder, str(model)), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def fetch(address: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=data), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_server_answers_for_every_file(shelf: tuple[str, Path], model: Path) -> None:
    address, folder = shelf
    assert fetch(address + "/") == (200, {"model": model.name, "files": ["one.kv", "two.kv"]})
    loaded = dropkv.load_model(str(model))
    for name in ("two.kv", "one.kv", "two.kv"):
        status, record = fetch(address + "/ask", {"file": name, "question": "Which ship?", "max_new_tokens": 8})
        own = dropkv.load(folder / name, model=loaded).ask("Which ship?", dropkv.Sampling(max_new_tokens=8))
        assert (status, record["answer"], record["generated_tokens"]) == (200, own.text, own.generated_tokens)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"file": "three.kv", "question": "Who?"}, 404, "three.kv: no such file"),
        ({"file": "../one.kv", "question": "Who?"}, 404, "no such file"),
        ({"file": "one.kv", "question": " "}, 400, "the question is empty"),
        ({"file": "one.kv", "question": "Who?", "max_new_tokens": 0}, 400, "--max-new-tokens 1"),
        ({"file": "one.kv", "question": "Who?", "max_new_tokens": "9"}, 400, "whole number"),
        ({"file": "one.kv"}, 400, '"question"'),
        ([], 400, "JSON object"),
        (b"{", 400, "Expecting"),
        (b"x" * 70_000, 400, "65536 bytes"),
    ],
)
def test_bad_requests_are_told_and_harm_nobody(shelf: tuple[str, Path], body: Any, status: int, word: str) -> None:
    address, folder = shelf
    (folder / "damaged.kv").write_bytes((folder / "one.kv").read_bytes()[:-9])
    try:
        found = fetch(address + "/ask", body)
        assert found[0] == status and word in found[1]["error"]
        damaged = fetch(address + "/ask", {"file": "damaged.kv", "question": "Who?"})
    finally:
        (folder / "damaged.kv").unlink()
    assert damaged[0] == 400 and "damaged.kv" in damaged[1]["error"]
    assert fetch(address + "/nothing")[0] == 404


def test_a_file_that_changed_is_opened_again(shelf: tuple[str, Path], model: Path) -> None:
    address, folder = shelf
    ask = {"file": "new.kv", "question": "Which ship?", "max_new_tokens": 1}
    for text in (TEXT, TEXT * 2):
        (folder / "new.txt").write_text(text)
        done = run_dropkv("compress", folder / "new.txt", "-o", folder, "--model", model, *SETTINGS, "--force")
        assert done.code == 0
        assert fetch(address + "/ask", ask)[0] == 200
    own = dropkv.load(folder / "new.kv", model=str(model)).ask("Which ship?", dropkv.Sampling(max_new_tokens=1))
    assert fetch(address + "/ask", ask)[1]["answer"] == own.text
    (folder / "new.kv").unlink()


@pytest.mark.slow
def test_the_tour_runs_from_top_to_bottom() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, str(ROOT / "examples" / "tour.py")]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    for fact in (
        "823 tokens, ",
        "copper kettle",
        "gone on with 1 turn",
        "questionerror: ",
        "unreadablefile: ",
        "first token",
    ):
        assert fact in done.stdout.casefold(), (fact, done.stdout)
