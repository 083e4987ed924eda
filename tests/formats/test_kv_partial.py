"""Smaller budgets inside `formats`: how much is read, in how many reads, what is checked, and what comes out."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import formats.reader
from formats import (
    CorruptFile,
    ExistingFile,
    Quantization,
    WriteFailed,
    header,
    read_file,
    read_header,
    shrink_file,
    verify_file,
    write_file,
)
from formats.blocks import block_place
from formats.entries import ENTRY_FIELDS, INDEX_FIELDS
from formats.partial import Part, plan_reads, read_parts
from formats.quantized import count_groups, quantize, restore
from formats.smaller import cut
from formats.source import open_source

FIELDS = (*INDEX_FIELDS, *ENTRY_FIELDS)
BLOCK = 4096


class Counting:
    """A source that remembers which bytes were asked for, as another kind of source would be: by its own gap and longest read."""

    def __init__(self, inner, gap=0, longest=4 << 20):
        self.inner, self.size, self.gap, self.longest, self.threads = inner, inner.size, gap, longest, 4
        self.reads = []
        self.lock = threading.Lock()

    def read_into(self, offset, out):
        with self.lock:
            self.reads.append((offset, len(out)))
        self.inner.read_into(offset, out)


@contextmanager
def counted(monkeypatch, **options):
    """The reader's sources count; gives the list of them."""
    sources = []

    @contextmanager
    def opened(path):
        with open_source(path) as inner:
            sources.append(Counting(inner, **options))
            yield sources[-1]

    with monkeypatch.context() as patch:
        patch.setattr(formats.reader, "open_source", opened)
        yield sources


def ranked(make_sample, *, n=400, layers=2, heads=3, dims=64, dtype="float32", **options):
    """A sample in which every head of the full layers has n entries, with admit 1 to n: any budget keeps so many rows."""
    sample = make_sample(dtype, n=n, d_k=dims, d_v=dims, counts=((n,) * heads,) * layers, **options)
    admit = torch.arange(1, n + 1, dtype=torch.int32).repeat(heads)
    made = [
        replace(entries, admit=admit) if info.kind == "full" else entries
        for entries, info in zip(sample.layers, sample.metadata.layers, strict=True)
    ]
    budget = replace(sample.metadata.budget, asked=1.0, kept=n)
    return replace(sample, layers=made, metadata=replace(sample.metadata, budget=budget))


def keeping(kept, asked=None):
    return lambda metadata: replace(metadata.budget, kept=kept, asked=asked or kept)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kept", [1, 3, 7, 12])
def test_entries_by_hand(tmp_path, make_sample, dtype, kept):
    """What is read and what is written are the rows with admit <= kept, those of sliding layers whole."""
    sample = make_sample(dtype)
    path, small = tmp_path / "book.kv", tmp_path / "small.kv"
    sample.write(path)
    contents = read_file(path, choose=keeping(kept))
    report = shrink_file(path, small, keeping(kept), writer="dropkv 9")
    written = read_file(small)
    for number, (info, entries) in enumerate(zip(sample.metadata.layers, sample.layers, strict=True)):
        keep = torch.ones(info.entries, dtype=torch.bool) if info.kind == "sliding" else entries.admit <= kept
        heads = [int(keep[a:b].sum()) for a, b in pairwise(entries.offsets)]
        for found in (contents.layers[number], written.layers[number]):
            assert found.offsets.tolist() == [0, *torch.tensor(heads).cumsum(0).tolist()]
            for field in FIELDS[1:]:
                got, want = getattr(found, field), getattr(entries, field)[keep]
                assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want))
        assert written.header.metadata.layers[number] == replace(info, entries=int(keep.sum()))
    assert torch.equal(written.tokens, sample.tokens) and torch.equal(contents.tokens, sample.tokens)
    assert contents.header.metadata == replace(written.header.metadata, writer=sample.metadata.writer)
    assert written.header.metadata == report.metadata and report.old_metadata == sample.metadata
    assert (report.file_bytes, report.old_file_bytes) == (small.stat().st_size, path.stat().st_size)
    assert written.header.metadata == replace(
        sample.metadata,
        writer="dropkv 9",
        budget=replace(sample.metadata.budget, kept=kept, asked=kept),
        layers=written.header.metadata.layers,
    )


def test_fidelity_stays_only_with_all_entries(tmp_path, make_sample, with_metadata):
    sample = with_metadata(make_sample(), fidelity={"kl": 0.25})
    sample.write(tmp_path / "book.kv")
    for kept, want in ((12, {"kl": 0.25}), (11, None)):
        report = shrink_file(tmp_path / "book.kv", tmp_path / "small.kv", keeping(kept), writer="x", overwrite=True)
        assert report.metadata.fidelity == read_header(tmp_path / "small.kv").metadata.fidelity == want


def test_the_same_file_comes_out_whatever_the_blocks(tmp_path, make_sample):
    """Heads end inside blocks and tensors inside batches; the new file's blocks are as long as the old one's."""
    sample = ranked(make_sample, n=300)
    path, small, direct = (tmp_path / name for name in ("book.kv", "small.kv", "direct.kv"))
    for block in (4096, 8192, 1 << 18):
        sample.write(path, block_bytes=block, overwrite=True)
        shrink_file(path, small, keeping(77), writer=sample.metadata.writer, overwrite=True)
        with open_source(path) as source:
            found = header.parse(source)
            index = formats.reader.read_index(source, found)
        smaller = cut(found.metadata, index, replace(sample.metadata.budget, kept=77, asked=77))
        layers = [
            type(entries)(
                *(torch.cat([getattr(entries, field)[a:b] for a, b in rows]) for field in ENTRY_FIELDS), **part
            )
            for entries, rows, part in zip(sample.layers, smaller.rows, smaller.index.layers, strict=True)
        ]
        replace(sample, metadata=smaller.metadata, layers=layers).write(direct, block_bytes=block, overwrite=True)
        assert small.read_bytes() == direct.read_bytes()
        assert verify_file(small).header.block_bytes == block


def quantized(sample, kind, key_group=4, value_group=4):
    """The sample with its entries as codes, on grids of a few entries."""
    groups = tuple(count_groups(layer.offsets.tolist(), key_group) for layer in sample.layers)
    how = Quantization(kind, key_group, value_group, groups)
    layers = [quantize(layer, how) for layer in sample.layers]
    return replace(sample, layers=layers, metadata=replace(sample.metadata, quantization=how))


@pytest.mark.parametrize("zstd", [None, 3])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("kept", [1, 3, 7, 11, 12])
def test_codes_and_grids_of_smaller_budgets(tmp_path, make_sample, kind, kept, zstd):
    """Codes as they were, and of each head the grids of its first entries; so they restore to the same numbers, bit for bit."""
    sample = quantized(make_sample(counts=((5, 9, 0), (7, 17, 8)), d_k=7, d_v=10), kind)
    path, small = tmp_path / "book.kv", tmp_path / "small.kv"
    sample.write(path, zstd=zstd)
    shrink_file(path, small, keeping(kept), writer=sample.metadata.writer)
    verify_file(small)
    written, chosen = read_file(small), read_file(path, choose=keeping(kept))
    assert chosen.header.metadata == written.header.metadata
    how, device = sample.metadata.quantization, torch.device("cpu")
    for number, (info, layer) in enumerate(zip(sample.metadata.layers, sample.layers, strict=True)):
        keep = torch.ones(info.entries, dtype=torch.bool) if info.kind == "sliding" else layer.admit <= kept
        counts = [int(keep[a:b].sum()) for a, b in pairwise(layer.offsets)]
        groups = torch.cat(
            [
                torch.arange(-(-int(b - a) // 4)) < -(-count // 4)
                for (a, b), count in zip(pairwise(layer.offsets), counts, strict=True)
            ]
        )
        restored = restore(layer, how, 7, 10, device, torch.float32)
        for found in (written, chosen):
            got = found.layers[number]
            for field in ("keys", "values", "value_scales", "value_zeros", "key_scales", "key_zeros"):
                want = getattr(layer, field)
                if want is None:
                    assert getattr(got, field) is None
                    continue
                rows = groups if field.startswith("key_") else keep
                assert torch.equal(bits(getattr(got, field)), bits(want[rows])), field
            again = restore(got, found.header.metadata.quantization, 7, 10, device, torch.float32)
            for field in ENTRY_FIELDS:
                assert torch.equal(getattr(again, field), getattr(restored, field)[keep])


@pytest.mark.parametrize("kind", [None, "int4"])
def test_compressed_files_stay_compressed(tmp_path, make_sample, kind):
    """The blocks that are needed are found by their stored sizes, and the new file is what a writer makes of the entries."""
    sample = ranked(make_sample, n=2000, dims=16, sliding=False)
    for layer in sample.layers:  # something that zstd can do something about
        layer.keys.copy_(layer.keys.round())
        layer.values.copy_(layer.values.round())
    if kind:
        sample = quantized(sample, kind, 32, 16)
    path, small, direct = (tmp_path / name for name in ("book.kv", "small.kv", "direct.kv"))
    sample.write(path, zstd=5, block_bytes=BLOCK)
    found = read_header(path)
    assert {found.tensors[f"layers.1.{field}"].codec for field in ENTRY_FIELDS} == {"zstd"}
    shrink_file(path, small, keeping(480), writer=sample.metadata.writer)
    part = read_file(path, choose=keeping(480))
    metadata = replace(part.header.metadata, writer=sample.metadata.writer)
    write_file(direct, metadata, part.layers, part.tokens, zstd=5, block_bytes=BLOCK)
    assert small.read_bytes() == direct.read_bytes()
    assert read_header(small).zstd == 5 and small.stat().st_size < path.stat().st_size / 3
    verify_file(small)


@pytest.mark.parametrize("zstd", [None, 3])
def test_a_quarter_of_the_budget_reads_a_quarter_of_the_entries(tmp_path, make_sample, monkeypatch, zstd):
    sample = ranked(make_sample, n=2000, sliding=False)
    path = tmp_path / "book.kv"
    sample.write(path, block_bytes=BLOCK, zstd=zstd)
    found = read_header(path)
    front = found.data_start + found.tensors["layers.0.keys"].start
    entry_bytes = sum(
        info.stop - info.start for name, info in found.tensors.items() if name.endswith(("keys", "values"))
    )
    with counted(monkeypatch) as sources:
        read_file(path, choose=keeping(500))
        read_file(path)
    read = [sum(length for offset, length in source.reads if offset >= front) for source in sources]
    assert read[1] == entry_bytes and (zstd or entry_bytes == 2 * 2 * 3 * 2000 * 256)
    # Two more blocks, at the ends of each head; compressed blocks are not all of one length.
    assert entry_bytes / 4.04 <= read[0] <= entry_bytes / 3.96 + 2 * 2 * 3 * 2 * BLOCK
    # Everything before the entries is read once, but for what the header's own length was taken from.
    index_bytes = sum(length for offset, length in sources[0].reads if found.data_start <= offset < front)
    assert index_bytes == front - found.data_start


def test_all_that_is_needed_comes_in_few_reads(tmp_path, make_sample, monkeypatch):
    """One read for the index of all layers, one for each head's rows in each tensor; fewer where gaps may be read along."""
    sample = ranked(make_sample, n=2000, sliding=False)
    path = tmp_path / "book.kv"
    sample.write(path, block_bytes=BLOCK)
    found = read_header(path)
    counts = []
    for gap, longest in ((0, 4 << 20), (2000 * 256, 1 << 30), (2000 * 256, 1 << 20)):
        with counted(monkeypatch, gap=gap, longest=longest) as sources:
            read_file(path, choose=keeping(500))
        reads = [read for read in sources[0].reads if read[0] >= found.data_start]
        assert all(length <= longest for _, length in reads)
        counts.append(len(reads))
    assert counts[0] == 1 + 2 * 2 * 3  # the index, and 2 layers x keys and values x 3 heads
    assert counts[1] == 2  # the index, and everything
    assert 2 < counts[2] <= 1 + -(-4 * 3 * 2000 * 256 // (1 << 20)) + 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), gap=st.sampled_from([0, 1, BLOCK, 3 * BLOCK, 1 << 20]),
    longest=st.sampled_from([1, BLOCK, 5 * BLOCK, 1 << 20]), count=st.integers(0, 12),
)  # fmt: skip
def test_plans_cover_what_is_wanted_and_read_nothing_twice(planned_file, seed, gap, longest, count):
    path, found = planned_file
    generator = torch.Generator().manual_seed(seed)
    infos = list(found.tensors.values())
    parts = []
    for _ in range(count):
        info = infos[int(torch.randint(len(infos), (1,), generator=generator))]
        start, stop = torch.randint(0, info.size + 1, (2,), generator=generator).sort().values.tolist()
        parts.append(Part(info, start, stop))
    reads = plan_reads(found, parts, gap=gap, longest=longest)
    assert plan_reads(found, [], gap=gap, longest=longest) == ()
    needed = {
        (part.info.name, number)
        for part in parts
        if part.stop > part.start
        for number in range(part.start // BLOCK, -(-part.stop // BLOCK))
    }
    blocks = [
        (span.info.name, number) for read in reads for span in read.spans for number in range(span.first, span.last)
    ]
    assert sorted(blocks) == sorted(needed)
    for read in reads:
        assert (read.start, read.stop) == (read.spans[0].start, read.spans[-1].stop)
        assert sum(span.last - span.first for span in read.spans) == 1 or read.stop - read.start <= longest
        assert all(0 <= b.start - a.stop <= gap for a, b in pairwise(read.spans))
        for span in read.spans:
            assert span.start == block_place(found, span.info, span.first)[0]
            assert span.stop == block_place(found, span.info, span.last - 1)[1]
    for before, after in pairwise(reads):
        assert before.stop <= after.start
        first = after.spans[0]
        assert (
            after.start - before.stop > gap or block_place(found, first.info, first.first)[1] - before.start > longest
        )
    raw = path.read_bytes()
    outs = [memoryview(bytearray(part.stop - part.start)) for part in parts]
    with open_source(path) as source:
        read_parts(Counting(source, gap, longest), found, list(zip(parts, outs, strict=True)), 2)
    for part, out in zip(parts, outs, strict=True):
        base = found.data_start + part.info.start
        assert out == raw[base + part.start : base + part.stop]


@pytest.fixture(scope="module")
def planned_file(tmp_path_factory):
    from tests.formats.conftest import build_sample

    path = tmp_path_factory.mktemp("planned") / "book.kv"
    build_sample("float32", n=300, d_k=48, d_v=16, counts=((300, 1, 0), (2, 300, 150))).write(path, block_bytes=BLOCK)
    return path, read_header(path)


def test_damage_matters_where_it_is_read_and_nowhere_else(tmp_path, make_sample):
    sample = ranked(make_sample, n=2000, sliding=False)
    path, small = tmp_path / "book.kv", tmp_path / "small.kv"
    sample.write(path, block_bytes=BLOCK)
    found = read_header(path)
    info = found.tensors["layers.1.values"]
    damaged = 2000 * 256 + 1000 * 256  # the thousandth row of the second head
    raw = bytearray(path.read_bytes())
    raw[found.data_start + info.start + damaged] ^= 1
    path.write_bytes(raw)
    where = rf"book\.kv: layers\.1\.values, block {damaged // BLOCK} "
    read_file(path, choose=keeping(900))
    shrink_file(path, small, keeping(900), writer="x")
    for attempt in (
        lambda: read_file(path),
        lambda: read_file(path, choose=keeping(1001)),
        lambda: shrink_file(path, small, keeping(1001), writer="x", overwrite=True),
    ):
        with pytest.raises(CorruptFile, match=where):
            attempt()
    assert read_header(small).metadata.budget.kept == 900  # what stood there stays
    assert sorted(item.name for item in tmp_path.iterdir()) == ["book.kv", "small.kv"]


def test_a_file_may_take_its_own_place(tmp_path, make_sample):
    sample = ranked(make_sample)
    path, other = tmp_path / "book.kv", tmp_path / "other.kv"
    sample.write(path, block_bytes=BLOCK)
    shrink_file(path, other, keeping(50), writer="x")
    with pytest.raises(ExistingFile, match="overwrite=True"):
        shrink_file(path, path, keeping(50), writer="x")
    shrink_file(path, path, keeping(50), writer="x", overwrite=True)
    assert path.read_bytes() == other.read_bytes()
    with pytest.raises(WriteFailed, match=r"none/small\.kv: cannot be written"):
        shrink_file(path, tmp_path / "none" / "small.kv", keeping(40), writer="x")


def test_heads_and_layers_may_end_up_empty(tmp_path, make_sample):
    sample = make_sample(counts=((5, 9, 0), (7, 7, 7)))
    sample.layers[1].admit.fill_(12)
    sample.write(tmp_path / "book.kv")
    shrink_file(tmp_path / "book.kv", tmp_path / "small.kv", keeping(11), writer="x")
    small = read_file(tmp_path / "small.kv")
    assert small.layers[1].keys.shape == (0, 6) and small.layers[1].offsets.tolist() == [0, 0, 0, 0]
    assert small.layers[2].keys.shape == (24, 6)


def test_memory_does_not_grow_with_the_file(tmp_path, make_sample):
    sample = ranked(make_sample, n=8000, layers=4, heads=4, dims=128, dtype="float32", sliding=False)
    path = tmp_path / "book.kv"
    size = sample.write(path)
    assert size > 120 << 20
    del sample
    tracemalloc.start()
    shrink_file(path, tmp_path / "small.kv", keeping(6000), writer="x", threads=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20
