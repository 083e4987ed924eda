"""What a line on standard error advises: it has to be something that helps."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dropkv.checkpoints import find_checkpoint
from dropkv.errors import ModelError, out_of_memory
from dropkv_cli.endings import failure, guarded
from tests.cli.conftest import Dropkv


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["verify", "{kv}", "--model", ""], 2, "the model has an empty name: name one (`dropkv models` lists aliases), or leave --model out"),
        (["compress", "{doc}", "-o", "a.kv", "--model", ""], 2, "the model has an empty name"),
        (["compress", "{doc}", "-o", "a.kv", "--revision", ""], 2, "the revision has an empty name"),
        (["query", "{kv}", "-f", ""], 2, "-f is empty: name a file with one question a line, or - for standard input"),
        (["query", "{kv}", "who?", "--resume", ""], 2, "--resume is empty: name a file that /save NAME.jsonl wrote, or leave it out"),
        (["push", "{kv}", ""], 2, "the repository is empty: write NAMESPACE/NAME"),
        (["pull", ""], 2, "the address is empty: write hf://NAMESPACE/NAME[@REVISION]/FILE.kv"),
        (["pull", "hf://me/books/a.kv", "-o", ""], 2, "-o is empty: name a file or a folder, or leave it out"),
        (["pull", "hf://me/books/a.kv", "-o", "hf://me/b/a.kv"], 2, "-o hf://me/b/a.kv is an address: name a file or a folder of this"),
        (["compress", "{doc}", "-o", "hf://me/books/"], 2, "-o hf://me/books/ is an address: write a file of this machine, then `dropkv push"),
        (["shrink", "{kv}", "-o", "hf://me/b/a.kv", "--budget", "9"], 2, "-o hf://me/b/a.kv is an address: write a file"),
        (["compress", "https://e.org/a.txt", "-o", "a.kv"], 1, "https://e.org/a.txt: is an address; download the text first (`curl"),
        (["compress", "{doc}", "-o", "/proc/x"], 1, "/proc/x: the folder /proc is not writable (no file can be made in it), choose another"),
        (["compress", "{doc}", "-o", "/proc/x/"], 1, "/proc/x/harbour.kv: the folder /proc is not writable (no file can be made in it)"),
        (["compress", "{doc}", "-o", "a.kv", "--observe", "question:"], 2, "observer 'question:' has nothing behind its colon: write question:TEXT"),
        (["compress", "{doc}", "-o", "a.kv", "--observe", "questions: "], 2, "observer 'questions: ' has nothing behind its colon: write questions:"),
        (["compress", "{kv}", "-o", "a.kv"], 1, "{kv}: is a .kv file, which holds a document already: ask it with `dropkv query`"),
        (["compress", "{kv}", "-o", "{kv}"], 2, "{kv} is a .kv file already: ask it with `dropkv query`, or `dropkv shrink` it"),
    ],
)  # fmt: skip
def test_lines(
    dropkv: Dropkv,
    kv: Path,
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    line: str,
) -> None:
    monkeypatch.chdir(document.parent)
    names = {"kv": kv.name, "doc": document.name}
    before = sorted(document.parent.iterdir())
    dropkv(*(argument.format(**names) for argument in arguments)).failed_with(code)
    told = dropkv(*(argument.format(**names) for argument in arguments)).err
    assert told.startswith("dropkv: " + line.format(**names)), told
    assert sorted(document.parent.iterdir()) == before


def test_a_folder_in_which_no_file_can_be_made(
    dropkv: Dropkv, document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as that of a full disk, which is found out before the model is loaded."""

    @contextmanager
    def full(dir: Path) -> Iterator[None]:
        assert dir == tmp_path
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    for output in (f"{tmp_path}/a.kv", f"{tmp_path}/new/"):
        compressed = dropkv("compress", document, "-o", output)
        compressed.failed_with(1, f"the folder {tmp_path} is not writable (no space left on device), choose another")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("unable to mmap 538090408 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_no_memory(error: Exception) -> None:
    assert out_of_memory(error)
    advice = "close other programs, or use --dtype bfloat16 or a smaller model"
    assert failure(error) == f"out of memory: {advice} or a shorter document"
    from dropkv.loading import _naming

    with pytest.raises(ModelError, match=f"^big: does not fit into memory; {advice}$"), _naming("big"):
        raise error


def test_other_errors_are_no_lack_of_memory() -> None:
    assert not out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not out_of_memory(ValueError("memory"))
    assert "`ulimit -v -u`" in failure(RuntimeError("can't start new thread"))


def test_what_fails_after_a_failure_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> None:
        raise ModelError("no such model")

    def names() -> None:
        raise MemoryError

    assert guarded(action, (), names) == 1
    assert capsys.readouterr() == ("", "dropkv: no such model\n")


def test_a_kv_file_of_any_name_is_no_document(dropkv: Dropkv, kv: Path, tmp_path: Path) -> None:
    text = shutil.copy(kv, tmp_path / "book.txt")
    dropkv("compress", text, "-o", tmp_path / "a.kv").failed_with(1, "book.txt: is a .kv file, which holds a document")


def test_a_model_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("dropkv.checkpoints._in_folder", locked)
    with pytest.raises(ModelError, match=f"^{tmp_path}: cannot be read .Permission denied.; check its permissions$"):
        find_checkpoint(str(tmp_path))
