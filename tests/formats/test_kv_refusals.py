"""The whole list of hostile files through every reader and command: one line each, nothing built, little memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import formats
from formats import FormatError, read_file, read_header, reader, verify_file
from tests.cli.conftest import run_dropkv
from tests.formats.conftest import Forgery, build_sample
from tests.formats.hostile import CASES, sparse

ROOT = Path(formats.__file__).parents[1]
MEMORY_PER_BYTE = 16  # of Python's own memory, for one byte of the file
MEMORY = 1 << 20  # besides
ADDRESS_SPACE = 512 << 20  # that a process may take once everything is imported: far from 3 GiB


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.kv"
    build_sample().write(path)
    return path.read_bytes()


@pytest.fixture
def hostile(request: pytest.FixtureRequest, tmp_path: Path, good_bytes: bytes) -> Path:
    """The file of the case that the test is parametrised with."""
    path = tmp_path / "bad.kv"
    path.write_bytes(good_bytes)
    CASES[request.param].make(path, Forgery.of(path))
    return path


every_case = pytest.mark.parametrize(("hostile", "case"), CASES.items(), ids=list(CASES), indirect=["hostile"])


@every_case
def test_every_reader_refuses_with_file_place_and_fix(hostile, case, monkeypatch):
    built: list[str] = []
    monkeypatch.setattr(reader, "LayerEntries", lambda *fields, **named: built.append("entries"))
    for read in (read_header, read_file, verify_file):
        if read is read_header and case.whole:
            read(hostile)
            continue
        if read is read_file and case.make is sparse:
            continue  # would get as much memory as the file is long; the limit below keeps it from that
        with pytest.raises(FormatError) as caught:
            read(hostile)
        line = str(caught.value)
        assert line.startswith(f"{hostile}: ") and line.isprintable() and len(line) < len(str(hostile)) + 500
        assert re.search(case.match, line), line
        assert "; " in line  # what to do
    assert built == []


@every_case
def test_every_command_says_one_line_and_leaves_with_1(hostile, case, monkeypatch):
    monkeypatch.delenv("DROPKV_DEBUG", raising=False)
    if case.make is sparse:
        return  # as above
    shown = case.whole  # then info has nothing to complain of
    for command in (["verify"], ["query", "Why?"]) if shown else (["verify"], ["info"], ["query", "Why?"]):
        run_dropkv(command[0], hostile, *command[1:]).failed_with(1, f"dropkv: {hostile}: ")


PROGRAM = """
import json, pathlib, resource, sys, tracemalloc
import torch
from formats import FormatError, UnreadableFile, read_file, read_header, verify_file
from tests.formats.conftest import Forgery
from tests.formats.hostile import CASES

good, bad, more = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
read_file(good), verify_file(good)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + more
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name, case in CASES.items():
    bad.is_dir() and not bad.is_symlink() and bad.rmdir()
    bad.unlink(missing_ok=True)
    case.make(bad, Forgery.of(good))
    size = bad.stat().st_size if bad.is_file() and not name.startswith("link") else 0
    peaks = []
    for read in (read_header, read_file, verify_file):
        tracemalloc.start()
        try:
            read(bad)
            refused = case.whole and read is read_header
        except FormatError:
            refused = True
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert refused, name
    print(json.dumps([name, size, max(peaks)]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit on memory is Linux's")
def test_memory_is_a_small_multiple_of_the_file(tmp_path, good_bytes):
    (tmp_path / "good.kv").write_bytes(good_bytes)
    command = [sys.executable, "-c", PROGRAM, tmp_path / "good.kv", tmp_path / "bad.kv", str(ADDRESS_SPACE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == list(CASES)
    over = [row for row in rows if row[2] > MEMORY_PER_BYTE * row[1] + MEMORY]
    assert over == []


def regions(path: Path) -> dict[str, tuple[int, int, str]]:
    """Name -> first byte, byte after the last, what the message must name."""
    header, raw = read_header(path), path.read_bytes()
    text = raw[8 : header.data_start].decode()
    end = header.data_start - (len(text) - len(text.rstrip()))
    inner = text.index('"dropkv":"') + 10 + 8
    table = text.index('"},"tokens":{') + 2 + 8
    found = {
        "header length": (0, 8, "file byte|header|first bytes|safetensors"),
        "opening": (8, inner, "header|first bytes|without a dropkv entry|file byte"),
        "metadata": (inner, table - 2, "header|file byte"),
        "tensor table": (table, end, "header|file byte"),
    }
    if end < header.data_start:
        found["padding"] = (end, header.data_start, "header|file byte")
    for name, info in header.tensors.items():
        found[name] = (header.data_start + info.start, header.data_start + info.stop, rf"{re.escape(name)}, block 0 ")
    return found


def test_every_bit_of_the_ends_and_the_middle_of_every_region(tmp_path, good_bytes):
    path = tmp_path / "bad.kv"
    path.write_bytes(good_bytes)
    found = regions(path)
    assert len(found) >= 4 + 1 + 3 * 6
    for name, (start, stop, match) in found.items():
        for place in {start, (start + stop) // 2, stop - 1}:
            for bit in range(8):
                damaged = bytearray(good_bytes)
                damaged[place] ^= 1 << bit
                path.write_bytes(damaged)
                with pytest.raises(FormatError) as caught:
                    read_file(path)
                assert re.search(match, str(caught.value)), (name, place, bit, str(caught.value))
