"""A writer killed anywhere, a disk that fills up anywhere, writers in each other's way: old file, new file, or none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import formats
from formats import ExistingFile, FormatError, WriteFailed, check_target, read_file, read_header, temporary, verify_file
from tests.formats.conftest import Sample, build_sample

ROOT = Path(formats.__file__).parents[1]
CALLS = ("open", "write", "lseek", "fsync", "link", "replace", "unlink", "close", "flock")


class Step:
    """Counts the system calls of a writer, and kills this process before, in or after the one it was told."""

    def __init__(self, number: int = -1, *, after: bool = False, written: int | None = None) -> None:
        self.number, self.after, self.written = number, after, written
        self.seen: list[tuple[str, int]] = []

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **named: Any) -> Any:
            here = len(self.seen) == self.number
            self.seen.append((name, len(args[1]) if name == "write" else 0))
            if here and self.written is not None:
                call(args[0], args[1][: self.written])
            if here and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **named)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return stepped


def in_a_child(action: Callable[[], None], step: Step) -> int:
    """Run the action in a child with its system calls counted; gives the signal that ended it, 0 for none."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            for name in CALLS:
                module = fcntl if name == "flock" else os
                setattr(module, name, step.around(name, getattr(module, name)))
            action()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def calls_of(action: Callable[[], None], step: Step, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every system call of the action, and the bytes of a write."""
    with monkeypatch.context() as patch:
        for name in CALLS:
            module = fcntl if name == "flock" else os
            patch.setattr(module, name, step.around(name, getattr(module, name)))
        action()
    return step.seen


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("existing", [True, False])
def test_killed_anywhere(tmp_path, existing, monkeypatch):
    path = tmp_path / "book.kv"
    old, new = (build_sample(counts=((3, 2),), sliding=False, seed=seed) for seed in (1, 2))
    bytes_of = {}
    for sample in (old, new):
        sample.write(path, overwrite=True)
        bytes_of[sample] = path.read_bytes()

    def prepare() -> None:
        path.unlink(missing_ok=True)
        if existing:
            old.write(path)

    def write() -> None:
        new.write(path, overwrite=existing)

    prepare()
    calls = calls_of(write, Step(), monkeypatch)
    assert {name for name, _ in calls} >= {
        "open",
        "write",
        "fsync",
        "flock",
        "close",
        "replace" if existing else "link",
    }
    rng = random.Random(5)
    steps = [Step(number, after=after) for number in range(len(calls)) for after in (False, True)]
    writes = [(number, size) for number, (name, size) in enumerate(calls) if name == "write"]
    assert sum(size for _, size in writes) == len(bytes_of[new])
    steps += [Step(number, written=cut) for number, size in writes for cut in {1, size // 2, size - 1}]
    header = writes[-1]
    steps += [Step(header[0], written=rng.randrange(header[1])) for _ in range(12)]
    ends = set()
    for step in steps:
        prepare()
        assert in_a_child(write, step) == signal.SIGKILL
        found = path.read_bytes() if path.exists() else None
        assert found in (bytes_of[new], bytes_of[old] if existing else None)
        ends.add(found == bytes_of[new])
        check_target(path, overwrite=True)  # how the next run begins
        assert names(tmp_path) == ([] if found is None else ["book.kv"])
    assert ends == {True, False}


def test_a_refused_run_cleans_up_too(tmp_path):
    path = tmp_path / "book.kv"
    build_sample().write(path)
    litter = tmp_path / f".book.kv.1.{'0' * 16}.tmp"
    litter.write_bytes(b"of a killed writer")
    with pytest.raises(ExistingFile):
        build_sample().write(path)
    assert names(tmp_path) == ["book.kv"]


def filling(room: int, call: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
    """os.write on a disk with room for so many bytes: the last write that fits is cut, the next one fails."""
    left = room

    def write(fd: int, data: Any) -> int:
        nonlocal left
        if data and not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = call(fd, data[:left])
        left -= done
        return done

    return write


def test_a_disk_that_is_full_after_any_byte(tmp_path, monkeypatch):
    path, sample = tmp_path / "book.kv", build_sample(counts=((3, 2),), sliding=False)
    build_sample(seed=1).write(path)
    before = path.read_bytes()
    other = tmp_path / "other.kv"
    size = sample.write(other)
    header = read_header(other)
    edges = {info.start for info in header.tensors.values()} | {header.tensors["layers.0.values"].stop, 0, size - 1}
    other.unlink()
    for room in sorted({*edges, *(edge + 1 for edge in edges if edge + 1 < size), *range(0, size, 23)}):
        for target, overwrite in ((path, True), (other, False)):
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", filling(room, os.write))
                with pytest.raises(WriteFailed) as caught:
                    sample.write(target, overwrite=overwrite)
            assert str(caught.value) == (
                f"{target}: cannot be written: no space left on device; free some space, or choose another folder"
            )
        assert names(tmp_path) == ["book.kv"]
        assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["fsync", "link", "replace", "open"])
def test_a_disk_that_fails_late(tmp_path, monkeypatch, name):
    path = tmp_path / "book.kv"
    build_sample(seed=1).write(path)
    before = path.read_bytes()
    real, calls = getattr(os, name), []

    def fail(*args: Any, **named: Any) -> Any:
        calls.append(args)
        if name == "open" and not args[1] & os.O_CREAT:
            return real(*args, **named)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, name, fail)
    target = path if name != "link" else tmp_path / "new.kv"
    with pytest.raises(WriteFailed, match=r"kv: cannot be written: input/output error"):
        build_sample().write(target, overwrite=name != "link")
    monkeypatch.undo()
    assert calls and names(tmp_path) == ["book.kv"] and path.read_bytes() == before


FULL_DISK = """
import json, os, sys
from pathlib import Path
from formats import FormatError, read_file
from tests.formats.conftest import build_sample
folder = Path(sys.argv[1])
build_sample(seed=1).write(folder / "old.kv")
lines = []
for name in ("old.kv", "new.kv"):
    try:
        build_sample(n=4000, counts=((4000, 4000),), sliding=False).write(folder / name, overwrite=True)
        lines.append("written")
    except FormatError as error:
        lines.append(str(error))
read_file(folder / "old.kv")
print(json.dumps([lines, sorted(os.listdir(folder))]))
"""


def test_a_small_disk_that_is_really_full(tmp_path):
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    try:
        subprocess.run(
            [*mount, 'mount -t tmpfs -o size=64k tmpfs "$1"', "sh", tmp_path], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mounting here")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*mount, script, "sh", tmp_path, sys.executable, FULL_DISK]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines, left = json.loads(done.stdout)
    advice = "cannot be written: no space left on device; free some space, or choose another folder"
    assert lines == [f"{tmp_path}/{name}: {advice}" for name in ("old.kv", "new.kv")]
    assert left == ["old.kv"]


def test_processes_that_write_one_path_while_it_is_read_and_one_is_killed(tmp_path):
    path = tmp_path / "book.kv"
    samples = [build_sample(seed=seed) for seed in range(3)]
    samples[0].write(path)
    tokens = {bytes(sample.tokens.numpy()) for sample in samples if sample.tokens is not None}
    until = time.monotonic() + 3

    def keep_writing(sample: Sample) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            for _ in range(40):
                sample.write(path, overwrite=True)
            code = 0
        finally:
            os._exit(code)

    victim, *others = [keep_writing(sample) for sample in samples]
    reads = 0
    while reads < 25 and time.monotonic() < until:
        found = read_file(path).tokens  # whole at any moment
        assert found is not None and bytes(found.numpy()) in tokens
        reads += 1
        if reads == 5:
            os.kill(victim, signal.SIGKILL)
    assert reads > 5
    assert [os.waitpid(pid, 0)[1] for pid in others] == [0, 0]
    os.waitpid(victim, 0)
    verify_file(path)
    check_target(path, overwrite=True)
    assert names(tmp_path) == ["book.kv"]


@pytest.mark.parametrize("renames", [True, False])
def test_a_file_system_without_links(tmp_path, monkeypatch, renames):
    def no_links(*args: Any, **named: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    if not renames:
        monkeypatch.setattr(temporary, "_rename_to_free_name", lambda *paths: False)
    path = tmp_path / "book.kv"
    build_sample(seed=1).write(path)
    before = path.read_bytes()
    read_file(path)
    with pytest.raises(FormatError), temporary.replacing(tmp_path / "late.kv", overwrite=False) as fd:
        os.write(fd, b"mine")
        (tmp_path / "late.kv").write_bytes(b"theirs")
    assert (tmp_path / "late.kv").read_bytes() == b"theirs"
    assert names(tmp_path) == ["book.kv", "late.kv"] and path.read_bytes() == before
