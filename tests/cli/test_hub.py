"""The commands with files on a Hub: processes of their own, HF_ENDPOINT on the loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, Result, run_dropkv, start_dropkv
from tests.hub_server import TOKEN, HubServer, serving, wait_for

ADDRESS = "hf://ns/books/harbour.kv"
Run = Callable[..., Result]


@pytest.fixture
def server() -> Iterator[HubServer]:
    with serving() as running:
        yield running


@pytest.fixture
def environment(server: HubServer, tmp_path: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def run(server: HubServer, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The commands in this process, where the Hub's client has read its environment long ago: told what it would have read."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)

    def run(*arguments: object, **env: str) -> Result:
        told = environment | env
        with monkeypatch.context() as patch:
            patch.setattr(constants, "ENDPOINT", told["HF_ENDPOINT"])
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", told["HF_ENDPOINT"] + template)
            patch.setattr(constants, "HF_HUB_CACHE", told["HF_HOME"] + "/hub")
            patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            patch.setattr(constants, "HF_HUB_OFFLINE", told["HF_HUB_OFFLINE"] == "1")
            patch.setenv("HF_TOKEN", told["HF_TOKEN"])
            ended = run_dropkv(*arguments)
        assert TOKEN not in ended.out + ended.err
        return ended

    return run


def test_push_info_pull_verify_and_query(server: HubServer, run: Run, kv: Path, model: Path, tmp_path: Path) -> None:
    pushed = run("push", kv, "ns/books", "--license", "cc-by-4.0", "--no-tokens")
    assert (pushed.code, pushed.out) == (0, ADDRESS + "\n")
    commit, files = server.repositories["ns/books"].commits[-1]
    lines = pushed.err.splitlines()
    assert lines[0].startswith(
        "warning: a KV file holds its document's content; whoever may read the repository can recover"
    )
    assert lines[1].endswith(
        f"without token ids, uploaded to the new private repository: {server.url}/ns/books/commit/{commit}"
    )
    assert len(lines) == 2

    before = len(server.requests("GET", "signature"))
    info = run("info", ADDRESS, "--json")
    assert (info.code, info.err) == (0, "")
    [record] = info.records
    assert (record["file"], record["file_bytes"]) == (ADDRESS, len(files["harbour.kv"]))
    assert record["document"]["name"] == "harbour.txt"
    length = 8 + int.from_bytes(files["harbour.kv"][:8], "little")
    assert sum(entry.sent for entry in server.requests("GET", "signature")[before:]) == length

    pulled = run("pull", ADDRESS, "-o", tmp_path / "mine.kv", "--json")
    assert (pulled.code, pulled.err) == (0, "")
    assert pulled.records == [
        {
            "address": ADDRESS,
            "commit": commit,
            "file": str(tmp_path / "mine.kv"),
            "file_bytes": record["file_bytes"],
            "downloaded": True,
        }
    ]
    assert (tmp_path / "mine.kv").read_bytes() == files["harbour.kv"]

    verified = run("verify", ADDRESS, HF_HUB_OFFLINE="1")
    assert verified.code == 0 and verified.out.startswith(f"ok: {ADDRESS}: header, structure, ")
    ours = run_dropkv("query", kv, "What is the code?", "--model", model, "--max-new-tokens", "8")
    theirs = run("query", ADDRESS, "What is the code?", "--model", model, "--max-new-tokens", "8", HF_HUB_OFFLINE="1")
    assert (theirs.code, theirs.out) == (0, ours.out)
    assert theirs.err.startswith(f"{ADDRESS}: harbour.txt, ")


def test_push_says_what_it_did_as_json_and_needs_a_licence(server: HubServer, run: Run, kv: Path) -> None:
    refused = run("push", kv, "ns/books")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.splitlines()[-1].startswith(
        "dropkv: no licence: name that of the document with --license ID, such as cc-by-4.0"
    )
    assert "ns/books" not in server.repositories
    first = run("push", kv, "ns/books", "--license", "other", "--public", "--name", "deep/tale.kv", "--json")
    commit = server.repositories["ns/books"].commits[-1][0]
    assert first.code == 0 and first.err.startswith("warning: a KV file holds its document's content; everybody can")
    assert first.records == [
        {
            "file": str(kv),
            "address": "hf://ns/books/deep/tale.kv",
            "commit": commit,
            "commit_url": f"{server.url}/ns/books/commit/{commit}",
            "private": False,
            "created": True,
            "changed": True,
            "file_bytes": kv.stat().st_size,
            "tokens_stored": True,
        }
    ]
    again = run("push", kv, "ns/books", "--name", "deep/tale.kv")
    again.failed_with(1, "hf://ns/books: is public", "--public")
    again = run("push", kv, "ns/books", "--name", "deep/tale.kv", "--public")
    assert again.code == 0 and "replaced in the public repository" in again.err


def test_a_terminal_is_asked_for_the_licence(server: HubServer, environment: dict[str, str], kv: Path) -> None:
    ours, theirs = os.openpty()
    process = start_dropkv("push", kv, "ns/books", env=environment, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    os.write(ours, b"Very free!\ncc0-1.0\n")
    out, _ = process.communicate(timeout=60)
    said = os.read(ours, 1 << 16).decode().replace("\r\n", "\n")
    os.close(ours)
    assert (process.returncode, out.decode()) == (0, ADDRESS + "\n")
    assert said.count("Licence of the document, such as cc-by-4.0") == 2
    assert "dropkv: 'Very free!' is no identifier of a licence" in said
    assert b"license: cc0-1.0\n" in server.repositories["ns/books"].commits[-1][1]["README.md"]


def test_failures_are_one_line(server: HubServer, run: Run, kv: Path, tmp_path: Path) -> None:
    server.add("ns/books", {"harbour.kv": kv.read_bytes()}, private=True)
    run("info", "hf://ns/books/none.kv").failed_with(1, "hf://ns/books/none.kv: the repository has no such file")
    run("info", "hf://ns/books/../x.kv").failed_with(2, "hf://NAMESPACE/NAME")
    run("query", ADDRESS, "?", HF_TOKEN="hf_" + "c" * 30).failed_with(1, "(401)", "hf auth login")
    run("verify", ADDRESS, HF_HUB_OFFLINE="1").failed_with(1, "not in the cache", "HF_HUB_OFFLINE")
    run("info", ADDRESS, HF_ENDPOINT="http://127.0.0.1:9").failed_with(
        1, "the Hub cannot be reached (http://127.0.0.1:9)", "use a file of this machine"
    )
    upload = run("push", kv, "ns/books", "--license", "mit", HF_ENDPOINT="http://127.0.0.1:9")
    upload.failed_with(1, "the Hub cannot be reached", "check the network")
    assert "use a file" not in upload.err
    run("pull", kv).failed_with(2, "is no address of the Hub")
    run("pull", ADDRESS, "-o", kv).failed_with(1, "exists already", "--force")
    (tmp_path / "notes.txt").write_text("some words of a document\n" * 9)
    run("push", tmp_path / "notes.txt", "ns/books", "--name", "notes.kv").failed_with(
        1, "notes.txt: is text, not a KV file"
    )
    run("push", kv, "books").failed_with(2, "NAMESPACE/NAME")
    run("info", f"{server.url}/ns/books/resolve/main/harbour.kv").failed_with(2, "is a web address")


def test_a_process_of_its_own_reads_the_environment(server: HubServer, environment: dict[str, str], kv: Path) -> None:
    server.add("ns/books", {"harbour.kv": kv.read_bytes()}, private=True)

    def info(**env: str) -> tuple[int, str, str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = start_dropkv("info", ADDRESS, env={**environment, **env}, **pipes)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.decode(), err.decode()

    code, out, err = info()
    assert (code, err) == (0, "") and out.startswith("model ")
    code, out, err = info(HF_TOKEN="hf_" + "c" * 34)
    assert (code, out) == (1, "") and err.startswith(
        f"dropkv: {ADDRESS}: the Hub does not accept the token in HF_TOKEN (401); set a valid one"
    )
    assert "ccc" not in err
    assert info(HF_HUB_OFFLINE="1")[2].startswith(
        f"dropkv: {ADDRESS}: not in the cache, and the network is switched off"
    )


def test_ctrl_c_while_a_file_comes_in_leaves_nothing(
    server: HubServer, environment: dict[str, str], kv: Path, tmp_path: Path
) -> None:
    import signal

    server.add("ns/books", {"harbour.kv": kv.read_bytes()})
    server.fail("GET", "signature", times=99, status=429, headers={"Retry-After": "30"})
    process = start_dropkv(
        "pull", ADDRESS, "-o", tmp_path / "mine.kv", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: bool(server.requests("GET", "signature")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert err.strip() == b"dropkv: interrupted; no file is left half-written"
    assert not (tmp_path / "mine.kv").exists()
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def test_nothing_of_the_hub_is_imported_for_files_of_this_machine(kv: Path) -> None:
    code = (
        "import sys\nfrom dropkv_cli.app import run\nrun(['info', sys.argv[1]])\nrun(['push', '--help'])\n"
        "sys.exit([name for name in ('huggingface_hub', 'torch', 'httpx', 'httpx2') if name in sys.modules] or 0)"
    )
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(kv)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--license" in done.stdout


def test_query_and_shrink_with_a_budget_fetch_what_it_needs(
    server: HubServer, run: Run, kv: Path, model: Path, tmp_path: Path
) -> None:
    server.add("ns/books", {"harbour.kv": kv.read_bytes()})
    common = ("What is the code?", "--model", model, "--max-new-tokens", "6", "--budget", "40", "--json")
    [found], [wanted] = run("query", ADDRESS, *common).records, run("query", kv, *common).records
    assert {**found, "seconds": 0} == {**wanted, "seconds": 0} and found["prefix_entries"] == 40
    assert not (tmp_path / "hf" / "hub").exists()
    for file, name in ((ADDRESS, "remote.kv"), (kv, "local.kv")):
        assert run("shrink", file, "-o", tmp_path / name, "--budget", "40").code == 0
    assert (tmp_path / "remote.kv").read_bytes() == (tmp_path / "local.kv").read_bytes()
    refused = run("shrink", ADDRESS, "-o", tmp_path / "none.kv", "--budget", "3")
    assert refused.code == 2 and refused.err.startswith(f"dropkv: {ADDRESS}: budget 3 of ")
