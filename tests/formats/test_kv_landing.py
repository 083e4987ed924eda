"""Entries read straight to where they are wanted: the values, what is checked on the way, buffers that are reused, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from formats import CorruptFile, Landing, UnreadableFile, header, read_file, read_header
from formats.landing import landed, read_onto
from formats.partial import Part, read_parts
from formats.quantized import restore_all
from formats.reader import read_index
from formats.smaller import cut
from formats.source import FileSource, open_source
from formats.staging import Buffer, Buffers, PinnedBuffer
from tests.formats.conftest import build_sample
from tests.formats.test_kv_partial import keeping, ranked
from tests.formats.test_kv_quantized import quantized_sample

CPU = torch.device("cpu")
FIELDS = ("keys", "values", "offsets", "positions", "admit", "scores")
N = 400


def onto(dtype):
    return lambda metadata: Landing((CPU,) * len(metadata.layers), dtype)


def expected(contents, dtype):
    """Entries of a plain read, turned into another type in the plainest way."""
    about = contents.header.metadata
    if about.quantization is not None:
        shapes = [(layer.d_k, layer.d_v) for layer in about.layers]
        return restore_all(contents.layers, about.quantization, shapes, [CPU] * len(shapes), dtype)
    return [replace(layer, keys=layer.keys.to(dtype), values=layer.values.to(dtype)) for layer in contents.layers]


def same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for field in FIELDS:
            a, b = getattr(one, field), getattr(other, field)
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), field
        assert one.key_scales is None and one.key_zeros is None
        assert one.value_scales is None and one.value_zeros is None


@pytest.fixture(scope="module", params=["bfloat16", "float16", "float32", "int8", "int4", "fp8"])
def files(request, tmp_path_factory):
    """One file raw and compressed: three layers, one sliding, in blocks of 4 KiB."""
    kind = request.param
    coded = kind in ("int8", "int4", "fp8")
    sample = ranked(build_sample, n=N, dtype="bfloat16" if coded else kind)
    sample = quantized_sample(sample, kind) if coded else sample
    folder = tmp_path_factory.mktemp(kind)
    for name, level in (("raw", None), ("zstd", 3)):
        sample.write(folder / name, block_bytes=4096, zstd=level)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [N, 101, 7])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_values_are_those_of_a_plain_read(files, codec, kept, dtype):
    choose = None if kept == N else keeping(kept)
    plain = read_file(files / codec, choose=choose)
    found = read_file(files / codec, choose=choose, onto=onto(dtype))
    assert found.header == plain.header
    wanted = expected(plain, dtype)
    same(found.layers, wanted)
    given = list(plain.layers)
    same(landed(given, plain.header.metadata, Landing((CPU,) * len(given), dtype)), wanted)
    assert given == []


class LateBuffer(Buffer):
    """Copies as a device does them: they are made when they are waited for, of the bytes that are in the buffer then."""

    def __init__(self, log):
        super().__init__()
        self.log, self.pending = log, []

    def _copy(self, part, out):
        self.pending.append((part, out))
        self.log.append("copy")

    def wait(self):
        for part, out in self.pending:
            out.copy_(part)
        self.pending.clear()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("longest", [4096, 20_000, 4 << 20])
def test_no_buffer_is_filled_again_before_its_copies_are_done(files, codec, longest):
    """Few buffers and many reads: a copy that is made late still finds what was checked, also when several threads read."""
    wanted = expected(read_file(files / codec), torch.float32)
    for threads, count in ((1, 1), (3, 3), (2, 4)):
        log: list[str] = []
        with open_source(files / codec) as source:
            source.longest = longest
            found = header.parse(source)
            whole = cut(found.metadata, read_index(source, found, None), found.metadata.budget)
            buffers = Buffers(lambda log=log: LateBuffer(log), count)
            layers = read_onto(source, found, whole, threads, onto(torch.float32)(found.metadata), buffers)
            buffers.wait()
        same(layers, wanted)
        assert log


def test_copies_are_large(tmp_path):
    """As many as reads and tensors, not as blocks and heads."""
    sample = ranked(build_sample, n=2000, sliding=False, dtype="bfloat16")
    path = tmp_path / "book.kv"
    sample.write(path, block_bytes=4096)
    log: list[str] = []
    with open_source(path) as source:
        found = header.parse(source)
        whole = cut(found.metadata, read_index(source, found, None), found.metadata.budget)
        buffers = Buffers(lambda: LateBuffer(log), 1)
        read_onto(source, found, whole, 1, onto(torch.bfloat16)(found.metadata), buffers)
        buffers.wait()
    stored = sum(info.size for info in found.tensors.values() if info.field in ("keys", "values"))
    assert 4 <= len(log) <= 4 + -(-stored // source.longest)


class Event:
    def __init__(self, log):
        self.log = log

    def synchronize(self):
        self.log.append("waited")


class Stream:
    def __init__(self, log):
        self.log = log

    def record_event(self):
        self.log.append("recorded")
        return Event(self.log)


class Unlocked(PinnedBuffer):
    """Page-locked memory needs a GPU."""

    def _allocate(self, size):
        return torch.empty(size, dtype=torch.uint8)


def test_a_page_locked_buffer_waits_for_the_event_behind_its_copies():
    log: list[str] = []
    buffer = Unlocked({CPU: Stream(log)})
    data = buffer.take(16)
    data[:] = torch.arange(8, dtype=torch.bfloat16).view(torch.uint8).numpy().data
    out = torch.zeros(4), torch.zeros(3, dtype=torch.bfloat16)
    buffer.send(0, 8, torch.bfloat16, out[0])
    buffer.send(10, 16, torch.bfloat16, out[1])
    assert log == []
    buffer.sent()
    assert log == ["recorded"]
    assert out[0].tolist() == [0, 1, 2, 3] and out[1].tolist() == [5, 6, 7]
    again = buffer.take(8)
    assert log == ["recorded", "waited"] and len(again) == 8
    buffer.sent()
    buffer.take(32)
    assert log == ["recorded", "waited"]  # nothing was copied


def test_numbers_that_stand_at_an_odd_byte_are_copied_all_the_same():
    buffer = Buffer()
    buffer.take(9)[1:] = torch.arange(4, dtype=torch.bfloat16).view(torch.uint8).numpy().data
    out = torch.zeros(4)
    buffer.send(1, 9, torch.bfloat16, out)
    assert out.tolist() == [0, 1, 2, 3]


def test_a_tensor_gets_the_bytes_of_any_part(tmp_path):
    sample = ranked(build_sample, n=2000, sliding=False, dtype="bfloat16")
    path = tmp_path / "book.kv"
    sample.write(path, block_bytes=4096)
    found = read_header(path)
    info = found.tensors["layers.1.values"]
    row = sample.layers[1].values.shape[1]
    parts = [(0, 1), (100, 1000), (999, 1000), (2500, 2500), (300, 6000)]
    outs = [torch.zeros((stop - start) * row) for start, stop in parts]
    wanted = [
        (Part(info, start * row * 2, stop * row * 2), out) for (start, stop), out in zip(parts, outs, strict=True)
    ]
    with open_source(path) as source:
        read_parts(source, found, wanted, 2)
    for (start, stop), out in zip(parts, outs, strict=True):
        assert torch.equal(out, sample.layers[1].values[start:stop].float().view(-1))


@pytest.mark.parametrize("how", ["cut", "changed", "cut to nothing"])
def test_a_file_that_changes_while_it_is_read_is_an_error(files, tmp_path, monkeypatch, how):
    """After its header was read, between two reads of entries: no signal, no values."""
    path = tmp_path / "book.kv"
    path.write_bytes((files / "raw").read_bytes())
    found = read_header(path)
    victim = found.tensors["layers.1.values"]
    at = found.data_start + victim.start + victim.size // 2
    plain = FileSource.read_into
    hit: list[int] = []

    def read_into(self, offset, out):
        if offset + len(out) > found.data_start + found.tensors["layers.0.keys"].start and not hit:
            hit.append(offset)
            with open(path, "r+b") as file:
                if how == "changed":
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 1]))
                else:
                    os.truncate(path, at if how == "cut" else 0)
        plain(self, offset, out)

    monkeypatch.setattr(FileSource, "read_into", read_into)
    wanted = r"layers\.1\.values, block \d+ .*does not match its hash" if how == "changed" else "became shorter while"
    with pytest.raises(CorruptFile, match=wanted):
        read_file(path, onto=onto(torch.float32), threads=2)
    assert hit


def test_where_entries_go_is_asked_before_any_are_read(files):
    class Elsewhere(Exception):
        pass

    def refuse(metadata):
        raise Elsewhere(metadata.document.name)

    with pytest.raises(Elsewhere):
        read_file(files / "raw", onto=refuse)


def test_memory_that_is_not_there_is_one_line(files, monkeypatch):
    if read_header(files / "raw").metadata.quantization is not None:
        pytest.skip("codes are allocated in their own types")
    plain = torch.empty

    def empty(*arguments, **options):
        if options.get("dtype") == torch.float64:
            raise RuntimeError("no memory")
        return plain(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(UnreadableFile, match=r"raw: needs \d+ MiB more of memory, which this machine does not give"):
        read_file(files / "raw", onto=onto(torch.float64))


MEMORY = """
import ctypes, pathlib, re, sys
import torch
sys.path[:0] = ["benchmarks"]
import file_speed, formats
folder = pathlib.Path(sys.argv[1])
def status(name): return int(re.search(name + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
def read(path): return formats.read_file(path, onto=lambda about: formats.Landing((torch.device("cpu"),) * len(about.layers), torch.float32))
layers = file_speed.entries(0.12)
for kind, level in (("same", None), ("same", 1), ("int8", None), ("int4", 1)):
    formats.write_file(folder / f"{kind}{level}", *file_speed.coded(layers, kind), None, zstd=level)
small = file_speed.entries(0.001)
del layers
for kind, level in (("same", None), ("same", 1), ("int8", None), ("int4", 1)):
    formats.write_file(folder / "small", *file_speed.coded(small, kind), None, zstd=level, overwrite=True)
    read(folder / "small")
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would hide what is taken
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    contents = read(folder / f"{kind}{level}")
    held = sum(t.numel() * t.element_size() for layer in contents.layers for t in vars(layer).values() if t is not None)
    print(kind, level, held, status("VmHWM") - before - held)
    del contents
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of resident memory are read from /proc")
def test_no_second_copy_in_host_memory(tmp_path):
    """Widened to float32, decompressed or restored: at most 96 MiB beside the entries themselves, of 240 MiB. Allocators leave 23 to 65 of them."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env=environment)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for kind, level, held, beside in lines:
        assert int(held) > 230 << 20
        assert int(beside) < 96 << 20, (kind, level, int(beside) >> 20)
