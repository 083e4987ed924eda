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

import openai
import pytest

import dropkv
from tests.cli.conftest import SETTINGS, TEXT, Dropkv, start_dropkv


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


def test_files_are_served_beside_a_damaged_one_until_ctrl_c(kv: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged.kv").write_bytes(kv.read_bytes()[:-9])
    with running(kv, f"again={kv}", tmp_path / "damaged.kv", "--model", model, "--log") as (process, said):
        assert said["model"] == model.name
        assert [file["name"] for file in said["files"]] == ["harbour", "again"]
        assert [file["name"] for file in said["failed"]] == ["damaged"]
        client = openai.OpenAI(base_url=said["address"] + "/v1", api_key="none", max_retries=0)
        want = dropkv.load(kv, model=str(model)).ask("Who?", dropkv.Sampling(max_new_tokens=8)).text
        for name in ("harbour", "again"):
            messages: Any = [{"role": "user", "content": "Who?"}]
            found = client.chat.completions.create(model=name, messages=messages, max_tokens=8)
            assert found.choices[0].message.content == want
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        lines = err.decode().splitlines()
        assert (process.returncode, out) == (130, b"")
        assert lines[0].startswith("dropkv: ") and "damaged.kv: " in lines[0]
        assert [line.split(" in ")[0] for line in lines[1:3]] == [
            f"{name}: {found.usage.prompt_tokens - said['files'][0]['document_tokens']} tokens read, 8 written"  # type: ignore[union-attr]
            for name in ("harbour", "again")
        ]
        assert [line for line in lines[3:] if line] == ["dropkv: interrupted; no file is left half-written"]


def test_ctrl_c_lets_a_running_answer_come_to_its_end(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model(max_position_embeddings=4096)
    (tmp_path / "harbour.txt").write_text(TEXT)
    dropkv.compress(tmp_path / "harbour.txt", model=str(model), chunk=32, budget=0.5, fidelity=False).save(
        tmp_path / "harbour.kv"
    )
    with running(tmp_path, "--model", model) as (process, said):
        client = openai.OpenAI(base_url=said["address"] + "/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "Who?"}]
        stream = client.chat.completions.create(model="harbour", messages=messages, max_tokens=600, stream=True)
        next(stream)
        process.send_signal(signal.SIGINT)
        last = [part.choices[0].finish_reason for part in stream][-1]
        _, err = process.communicate(timeout=20)
        assert (last, process.returncode) == ("length", 130)
        assert err.decode().splitlines()[0] == "finishing 1 answer; Ctrl-C again ends at once"


def test_ctrl_c_twice_ends_at_once(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model(max_position_embeddings=65536)
    (tmp_path / "harbour.txt").write_text(TEXT)
    dropkv.compress(tmp_path / "harbour.txt", model=str(model), chunk=32, budget=0.5, fidelity=False).save(
        tmp_path / "harbour.kv"
    )
    with running(tmp_path / "harbour.kv", "--model", model) as (process, said):
        client = openai.OpenAI(base_url=said["address"] + "/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "Who?"}]
        stream = client.chat.completions.create(model="harbour", messages=messages, max_tokens=50_000, stream=True)
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
    assert lines[2] == "dropkv: none of 2 files can be served"


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
    dropkv("serve", kv, kv).failed_with(2, "both be called harbour", "NAME=FILE")
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
