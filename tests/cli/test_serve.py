"""`dropkv serve` as a process: what it says, what it refuses at the start, and how it ends."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dropkv
from tests.cli.conftest import SETTINGS, TEXT, Dropkv, start_dropkv

openai = pytest.importorskip("openai", reason="pip install 'dropkv[test]'")


@contextmanager
def running(*arguments: object) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A server and what it says of itself once requests can come."""
    process = start_dropkv("serve", *arguments, "--port", "0", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def patient(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with room for long answers, and a file of it."""
    model, folder = make_model(endless=True, max_position_embeddings=65536), tmp_path_factory.mktemp("patient")
    made = dropkv.compress(
        TEXT, model=str(model), name="harbour.txt", chunk=32, budget=0.5, method="adadropkv", fidelity=False
    )
    made.save(folder / "harbour.kv")
    return model, folder / "harbour.kv"


def asking(address: str, **options: Any) -> Any:
    client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0, timeout=60)
    messages: Any = [{"role": "user", "content": "Who?"}]
    return client.chat.completions.create(messages=messages, **options)


def test_files_are_served_beside_a_damaged_one_until_ctrl_c(patient: tuple[Path, Path], tmp_path: Path) -> None:
    model, kv = patient
    (tmp_path / "damaged.kv").write_bytes(kv.read_bytes()[:-9])
    with running(kv, f"again={kv}", tmp_path, "--model", model, "--log") as (process, said):
        assert said["model"] == model.name
        assert [file["name"] for file in said["files"]] == ["harbour", "again"]
        assert [(file["name"], file["exit"]) for file in said["failed"]] == [("damaged", 1)]
        want = dropkv.load(kv, model=str(model)).ask("Who?", dropkv.Sampling(max_new_tokens=8))
        for name in ("harbour", "again"):
            found = asking(said["address"], model=name, max_tokens=8).choices[0].message.content
            assert found == want.text
        stream = asking(said["address"], model="harbour", max_tokens=300, stream=True)
        next(stream)
        process.send_signal(signal.SIGINT)
        assert [part.choices[0].finish_reason for part in stream][-1] == "length"
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (130, b"")
        damaged, *lines = [line for line in err.decode().splitlines() if line]
        assert damaged.startswith("dropkv: ") and "damaged.kv: " in damaged
        read = f"{want.prefilled_tokens} tokens read"
        assert [line.split(" in ")[0] for line in lines] == [
            f"harbour: {read}, 8 written",
            f"again: {read}, 8 written",
            "finishing 1 answer; Ctrl-C again ends at once",
            f"harbour: {read}, 300 written",
            "dropkv: interrupted",
        ]


def test_ctrl_c_twice_ends_at_once(patient: tuple[Path, Path]) -> None:
    model, kv = patient
    with running(kv, "--model", model) as (process, said):
        stream = asking(said["address"], model="harbour", max_tokens=50_000, stream=True)
        next(stream)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        process.communicate(timeout=15)
        assert process.returncode == 130


def test_without_any_good_file_nothing_is_served(dropkv: Dropkv, kv: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.kv"
    bad.write_bytes(kv.read_bytes()[:-9])
    found = dropkv("serve", bad, tmp_path / "none.kv", "--port", "0")
    assert (found.code, found.out) == (1, "")
    lines = found.err.splitlines()
    assert len(lines) == 3 and "bad.kv: " in lines[0] and "none.kv: " in lines[1]
    assert lines[2] == "dropkv: none of these 2 files can be served: see above"
    dropkv("serve", tmp_path / "none.kv", "--port", "0").failed_with(1, "none.kv: no such file")


def test_what_is_no_kv_file_is_told_before_anything_slow_is_imported(
    dropkv: Dropkv, kv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Imported(Exception):
        pass

    def refuse() -> None:
        raise Imported

    monkeypatch.setattr("dropkv_cli.serve.import_compiler", refuse)
    none, text = tmp_path / "none.kv", tmp_path / "text.kv"
    text.write_text("no file")
    dropkv("serve", none, "--port", "0").failed_with(1, "none.kv: no such file")
    found = dropkv("serve", none, text, "--port", "0").err.splitlines()
    assert "none.kv: no such file" in found[0] and "text.kv: " in found[1]
    assert found[2:] == ["dropkv: none of these 2 files can be served: see above"]
    found = dropkv("serve", none, kv, "--port", "0").err.splitlines()
    assert "none.kv: no such file" in found[0] and "Imported" in found[1]  # the other would be served


def test_files_of_different_models_are_refused(
    dropkv: Dropkv, kv: Path, model: Path, make_model: Callable[..., Path], document: Path, tmp_path: Path
) -> None:
    other = make_model(seed=5)
    shutil.copy(document, tmp_path / "other.txt")
    made = dropkv("compress", tmp_path / "other.txt", "-o", tmp_path / "other.kv", "--model", other, *SETTINGS)
    assert made.code == 0, made.err
    dropkv("serve", kv, tmp_path / "other.kv", "--port", "0", "--model", model).failed_with(
        1, "other.kv: made with", "--model"
    )


def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(dropkv: Dropkv, kv: Path) -> None:
    dropkv("serve").failed_with(2, "FILE")
    dropkv("serve", "-").failed_with(2, "pipe")
    dropkv("serve", kv, kv).failed_with(2, "is given twice", "name each one once")
    dropkv("serve", kv, "--port", "70000").failed_with(2, "65535")
    dropkv("serve", kv, "--host", "no.such.host.invalid").failed_with(2, "no.such.host.invalid", "127.0.0.1")
    dropkv("serve", kv, "--batch-size", "0").failed_with(2, "--batch-size 1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        dropkv("serve", kv, "--port", port).failed_with(1, f"port {port} of 127.0.0.1", "--port")


def test_without_the_extra_it_says_what_to_install(dropkv: Dropkv, kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropkv_cli.serve.find_spec", lambda name: None)
    dropkv("serve", kv).failed_with(1, "starlette and uvicorn", "pip install 'dropkv[serve]'")
