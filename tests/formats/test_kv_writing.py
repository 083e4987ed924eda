"""A target is replaced whole or not at all, and no temporary file outlives its writer for longer than one write."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import formats
from formats import ExistingFile, WriteFailed, check_target, read_file
from formats.temporary import _claim_and_replace, replacing

ROOT = Path(formats.__file__).parents[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0, 0o666)])
def test_mode_follows_the_umask(tmp_path, sample, mask, mode):
    before = os.umask(mask)
    try:
        sample.write(tmp_path / "book.kv")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "book.kv").stat().st_mode) == mode


def test_existing_file_needs_overwrite(tmp_path, kv, make_sample):
    before = kv.read_bytes()
    other = make_sample(seed=1)
    with pytest.raises(ExistingFile, match=r"book\.kv: exists already; .*overwrite=True"):
        other.write(kv)
    assert kv.read_bytes() == before
    other.write(kv, overwrite=True)
    assert kv.read_bytes() != before
    read_file(kv)
    assert names(tmp_path) == ["book.kv"]


def test_target_can_be_checked_early(tmp_path, kv):
    check_target(tmp_path / "new.kv")
    check_target(kv, overwrite=True)
    with pytest.raises(ExistingFile, match=r"book\.kv: exists already"):
        check_target(kv)
    assert names(tmp_path) == ["book.kv"]


def test_an_open_file_keeps_its_old_bytes(kv, make_sample):
    before = kv.read_bytes()
    with kv.open("rb") as file:
        make_sample(seed=1).write(kv, overwrite=True)
        assert file.read() == before


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_file_that_appears_meanwhile(tmp_path, overwrite):
    path = tmp_path / "book.kv"

    def write() -> None:
        with replacing(path, overwrite=overwrite) as fd:
            os.write(fd, b"mine")
            path.write_bytes(b"theirs")

    if overwrite:
        write()
        assert path.read_bytes() == b"mine"
    else:
        with pytest.raises(ExistingFile):
            write()
        assert path.read_bytes() == b"theirs"
    assert names(tmp_path) == ["book.kv"]


def test_without_hard_links_the_name_is_claimed_first(tmp_path):
    (tmp_path / "t").write_bytes(b"mine")
    (tmp_path / "book.kv").write_bytes(b"theirs")
    with pytest.raises(ExistingFile):
        _claim_and_replace(tmp_path / "t", tmp_path / "book.kv")
    assert (tmp_path / "book.kv").read_bytes() == b"theirs"
    _claim_and_replace(tmp_path / "t", tmp_path / "new.kv")
    assert (tmp_path / "new.kv").read_bytes() == b"mine"
    assert names(tmp_path) == ["book.kv", "new.kv"]


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize(
    ("failure", "raised", "match"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (ValueError("bug"), ValueError, "bug"),
        (OSError(errno.ENOSPC, "No space left on device"), WriteFailed, "no space left on device; free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), WriteFailed, "quota"),
        (OSError(errno.EIO, "Input/output error"), WriteFailed, "input/output error; choose"),
    ],
)
def test_failure_leaves_the_old_file_and_no_litter(tmp_path, existing, failure, raised, match):
    path = tmp_path / "book.kv"
    if existing:
        path.write_bytes(b"old")
    with pytest.raises(raised, match=match), replacing(path, overwrite=True) as fd:
        os.write(fd, b"new")
        raise failure
    assert names(tmp_path) == (["book.kv"] if existing else [])
    assert not existing or path.read_bytes() == b"old"


def test_a_real_write_that_runs_out_of_room(kv, make_sample, tmp_path):
    before = kv.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))
    try:
        with pytest.raises(WriteFailed, match=r"book\.kv: cannot be written: file too large; raise the limit"):
            make_sample(n=4000, counts=((4000, 4000),)).write(kv, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kv.read_bytes() == before
    assert names(tmp_path) == ["book.kv"]


def test_targets_that_cannot_be_written(tmp_path, sample):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder.kv").mkdir()
    (tmp_path / "loop.kv").symlink_to("loop.kv")
    os.mkfifo(tmp_path / "pipe.kv")
    cases = {
        "missing/book.kv": r"no such file or directory; make the folder first",
        "file/book.kv": "not a directory",
        "folder.kv": "is a folder, not a file",
        "loop.kv": "too many levels",
        "pipe.kv": "is a pipe, not a file",
        "new/": "is the name of a folder",
        "x" * 300: "file name too long; choose a shorter name",
        "nul\0": "is no file name",
    }
    before = names(tmp_path)
    for name, match in cases.items():
        with pytest.raises(WriteFailed, match=match):
            sample.write(f"{tmp_path}/{name}", overwrite=True)
        if not name.startswith("xxx"):  # the length of a name is the file system's business
            with pytest.raises(WriteFailed, match=match):
                check_target(f"{tmp_path}/{name}", overwrite=True)
    with pytest.raises(WriteFailed):
        sample.write("/proc/book.kv")
    with pytest.raises(WriteFailed, match="is a device"):
        sample.write("/dev/null", overwrite=True)
    assert names(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_read_only_folder(tmp_path, sample):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(WriteFailed, match="permission denied; choose a folder that can be written"):
            sample.write(tmp_path / "book.kv")
    finally:
        tmp_path.chmod(0o700)


def test_a_link_is_followed_and_the_longest_name_works(tmp_path, kv, make_sample):
    (tmp_path / "link.kv").symlink_to("book.kv")
    make_sample(seed=1).write(tmp_path / "link.kv", overwrite=True)
    assert (tmp_path / "link.kv").is_symlink()
    make_sample(seed=1).write(tmp_path / "plain.kv")
    assert kv.read_bytes() == (tmp_path / "plain.kv").read_bytes()
    longest = "x" * 252 + ".kv"
    make_sample().write(tmp_path / longest)
    assert longest in names(tmp_path)


WRITER = """
import os, sys, time
from formats.temporary import replacing
with replacing(sys.argv[1], overwrite=True) as fd:
    os.write(fd, b"half a file")
    print("ready", flush=True)
    time.sleep(60)
"""


def start_writer(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a background job ignores Ctrl-C and hands that down
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_killed_writer_leaves_the_old_file_and_the_next_write_cleans_up(tmp_path, kv, sample):
    before = kv.read_bytes()
    with start_writer(kv) as process:
        process.send_signal(signal.SIGKILL)
    assert kv.read_bytes() == before
    (litter,) = [name for name in names(tmp_path) if name.endswith(".tmp")]
    assert litter.startswith(f".book.kv.{process.pid}.")
    (tmp_path / ".book.kv.bak.tmp").write_bytes(b"not ours")
    (tmp_path / f".other.kv.1.{'0' * 16}.tmp").write_bytes(b"of another target")
    sample.write(tmp_path / "third.kv")
    assert litter in names(tmp_path)
    sample.write(kv, overwrite=True)
    assert names(tmp_path) == sorted([".book.kv.bak.tmp", f".other.kv.1.{'0' * 16}.tmp", "book.kv", "third.kv"])


def test_living_writers_file_is_left_alone(tmp_path, kv, sample):
    with start_writer(kv) as process:
        sample.write(kv, overwrite=True)
        (living,) = [name for name in names(tmp_path) if name.endswith(".tmp")]
        assert (tmp_path / living).read_bytes() == b"half a file"
        process.send_signal(signal.SIGINT)
    assert names(tmp_path) == ["book.kv"]
    read_file(kv)


def test_writers_side_by_side_never_mix(tmp_path, make_sample):
    samples = [make_sample(seed=seed) for seed in range(4)]
    path = tmp_path / "book.kv"
    errors: list[BaseException] = []

    def write(sample) -> None:
        try:
            for _ in range(5):
                sample.write(path, overwrite=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(sample,)) for sample in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = read_file(path)
    assert any((found.tokens == sample.tokens).all() for sample in samples)
    assert names(tmp_path) == ["book.kv"]
