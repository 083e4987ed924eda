"""Compressed tensors: what comes out is what went in, in any part of it, and no frame makes more than its block has room for."""

from __future__ import annotations

import random
import re
import tracemalloc
from dataclasses import replace

import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from formats import CorruptFile, FormatError, WriteFailed, codecs, read_file, read_header, verify_file
from formats.codecs import decode, encode
from formats.grids import SCALE_FIELDS
from formats.partial import Part, read_parts
from formats.quantized import describe, quantize
from formats.source import open_source
from tests.formats.conftest import Forgery

FIELDS = ("offsets", "positions", "admit", "scores", "keys", "values", *SCALE_FIELDS)
BLOCK = 4096


def data(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_entries(contents, sample):
    for found, wanted in zip(contents.layers, sample.layers, strict=True):
        for field in FIELDS:
            got, want = getattr(found, field), getattr(wanted, field)
            assert (got is None) == (want is None)
            assert want is None or (got.dtype == want.dtype and torch.equal(data(got), data(want)))


@pytest.fixture
def large(make_sample):
    """Several blocks of 4096 bytes in most tensors."""
    return make_sample(n=3000, counts=((3000, 1, 200), (0, 900, 900)), d_k=16, d_v=12)


def stored_as(sample, kind):
    if kind == "same":
        return sample
    about = describe(kind, [layer.offsets.tolist() for layer in sample.layers])
    layers = [quantize(layer, about) for layer in sample.layers]
    return replace(sample, metadata=replace(sample.metadata, quantization=about), layers=layers)


@pytest.mark.parametrize("kind", ["same", "fp8", "int8", "int4"])
@pytest.mark.parametrize("level", [1, 3, 19])
def test_round_trip_of_every_kind_and_level(tmp_path, large, kind, level):
    sample = stored_as(large, kind)
    path = tmp_path / "book.kv"
    size = sample.write(path, zstd=level, block_bytes=BLOCK)
    contents = read_file(path)
    header = contents.header
    assert (header.format_version, header.oldest_reader, header.zstd) == (2, 2, level)
    assert header.metadata == sample.metadata and header.file_bytes == size == path.stat().st_size
    assert_same_entries(contents, sample)
    assert torch.equal(contents.tokens, sample.tokens)
    report = verify_file(path)
    assert report.data_bytes == sum(info.size for info in header.tensors.values()) > size - header.data_start
    assert report.blocks == sum(-(-info.size // BLOCK) for info in header.tensors.values())
    sample.write(tmp_path / "again.kv", zstd=level, block_bytes=BLOCK, threads=1)
    assert (tmp_path / "again.kv").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_round_trip_of_every_dtype(tmp_path, make_sample, dtype):
    sample = make_sample(dtype, n=2000, counts=((2000, 0, 5),))
    plain = sample.write(tmp_path / "plain.kv")
    assert sample.write(tmp_path / "book.kv", zstd=3) < plain
    assert_same_entries(read_file(tmp_path / "book.kv"), sample)


def test_a_tensor_stays_raw_when_less_than_a_64th_is_saved(tmp_path, make_sample):
    """Random bits do not shrink, and with a 32nd or a 128th of them zero they shrink by just more or less than a 64th."""
    shares = {}
    for every in (1, 32, 128):
        sample = make_sample("float64", n=4000, counts=((4000, 4000, 4000),), d_k=8, d_v=8, sliding=False)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randint(0, 256, (12000 * 64,), generator=generator, dtype=torch.uint8)
        if every > 1:
            noise[: len(noise) // every] = 0
        sample.layers[0] = replace(sample.layers[0], keys=noise.view(torch.float64).view(12000, 8))
        sample.write(tmp_path / "book.kv", zstd=3, overwrite=True)
        info = read_header(tmp_path / "book.kv").tensors["layers.0.keys"]
        assert_same_entries(read_file(tmp_path / "book.kv"), sample)
        shares[every] = (info.codec, info.sizes is None)
        if info.codec == "zstd":
            assert info.stop - info.start <= info.size - info.size / 64
    assert shares == {1: ("raw", True), 32: ("zstd", False), 128: ("raw", True)}


def test_the_layout_is_the_one_of_the_specification(tmp_path, large):
    """Read with safetensors, zstandard and numpy alone."""
    import numpy

    large.write(tmp_path / "book.kv", zstd=3, block_bytes=BLOCK)
    header = read_header(tmp_path / "book.kv")
    with safe_open(tmp_path / "book.kv", framework="np") as file:
        for name, info in header.tensors.items():
            stored = file.get_tensor(name)
            if info.codec == "raw":
                continue
            assert stored.dtype == numpy.uint8 and stored.shape == (sum(info.sizes),)
            item = {"bfloat16": 2, "int32": 4, "float32": 4}[info.dtype]
            raw, at = b"", 0
            for size, inner, outer in zip(info.sizes, info.blocks, info.stored, strict=True):
                frame = stored[at : at + size].tobytes()
                planes = numpy.frombuffer(zstandard.ZstdDecompressor().decompress(frame), numpy.uint8).reshape(item, -1)
                block = numpy.ascontiguousarray(planes.T).tobytes()
                assert xxhash.xxh3_128_hexdigest(frame) == outer and xxhash.xxh3_128_hexdigest(block) == inner
                raw, at = raw + block, at + size
            layer = large.layers[int(name.split(".")[1])] if name != "tokens" else None
            wanted = large.tokens if layer is None else getattr(layer, info.field)
            assert raw == data(wanted).numpy().tobytes()
    assert sum(info.codec == "zstd" for info in header.tensors.values()) > 8


def test_any_part_of_a_tensor_can_be_read_alone(tmp_path, large):
    path = tmp_path / "book.kv"
    large.write(path, zstd=3, block_bytes=BLOCK)
    wanted = data(large.layers[0].keys).numpy().tobytes()
    generator = random.Random(1)
    pairs = [sorted(generator.choices(range(len(wanted) + 1), k=2)) for _ in range(60)]
    pairs += [[0, 0], [0, len(wanted)], [BLOCK, 2 * BLOCK], [BLOCK - 1, BLOCK + 1], [len(wanted) - 1, len(wanted)]]
    header = read_header(path)
    info = header.tensors["layers.0.keys"]
    assert info.codec == "zstd" and len(info.blocks) > 20
    with open_source(path) as source:
        for start, stop in pairs:
            out = bytearray(stop - start)
            read_parts(source, header, [(Part(info, start, stop), memoryview(out))], threads=1)
            assert bytes(out) == wanted[start:stop]


def test_a_flipped_bit_anywhere_is_noticed(tmp_path, make_sample):
    path = tmp_path / "book.kv"
    make_sample(n=400, counts=((400, 9, 0),)).write(path, zstd=3)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    rng = random.Random(5)
    for place in [*rng.sample(range(start), 150), *rng.sample(range(start, len(raw)), 600)]:
        damaged = bytearray(raw)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            read_file(path)
    path.write_bytes(raw)
    read_file(path)


def test_damage_is_placed_in_the_file(tmp_path, large):
    path = tmp_path / "book.kv"
    large.write(path, zstd=3, block_bytes=BLOCK)
    header = read_header(path)
    info = header.tensors["layers.0.values"]
    first = header.data_start + info.start + sum(info.sizes[:3])
    raw = bytearray(path.read_bytes())
    raw[first + 9] ^= 1
    path.write_bytes(raw)
    place = re.escape(f"layers.0.values, block 3 (file bytes {first}-{first + info.sizes[3] - 1})")
    for read in (read_file, verify_file):
        with pytest.raises(CorruptFile, match=place + ": does not match its hash"):
            read(path)


@settings(max_examples=60, deadline=None)
@given(raw=st.binary(max_size=600), item=st.sampled_from([1, 2, 4, 8]), level=st.sampled_from([1, 3, 22]))
def test_frames_hold_what_was_put_in(raw, item, level):
    raw = raw[: len(raw) // item * item]
    if not raw:
        return
    frame = encode(memoryview(raw), item, level)
    assert bytes(decode(memoryview(frame), len(raw), item)) == raw
    assert len(frame) <= codecs.most_stored(len(raw))
    for wrong in (len(raw) - item, len(raw) + item):
        with pytest.raises(CorruptFile):
            decode(memoryview(frame), wrong, item)


def frame_of(content, **options):
    return zstandard.ZstdCompressor(**options).compress(content)


def parameters(**values):
    return {"compression_params": zstandard.ZstdCompressionParameters(**values)}


NOISE = random.Random(2).randbytes(300_000)
FRAMES = {
    "a bomb": frame_of(bytes(1 << 30)),
    "one byte more": frame_of(bytes(4097)),
    "one byte less": frame_of(bytes(4095)),
    "of no announced length": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096)),
    "with a checksum": frame_of(bytes(4096), write_checksum=True),
    "two frames": frame_of(bytes(4096)) + frame_of(bytes(4096)),
    "bytes behind": frame_of(bytes(4096)) + b"\0",
    "cut off": frame_of(NOISE[:4096])[:-3],
    "empty frame": frame_of(b""),
    "a skippable frame": b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    "no frame": NOISE[:200],
    "nothing": b"",
    "magic alone": b"\x28\xb5\x2f\xfd",
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames_that_are_none_of_a_block_are_refused_before_they_unfold(case):
    tracemalloc.start()
    with pytest.raises(CorruptFile):
        decode(memoryview(FRAMES[case]), 4096, 2)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_frame_that_lies_about_its_length_is_refused():
    """The header announces 4096 bytes, the blocks hold more or fewer."""
    for real in (4000, 5000):
        frame = bytearray(frame_of(NOISE[:real], **parameters(compression_level=3, write_content_size=True)))
        at = frame.index((real - 256).to_bytes(2, "little"))
        frame[at : at + 2] = (4096 - 256).to_bytes(2, "little")
        with pytest.raises(CorruptFile):
            decode(memoryview(bytes(frame)), 4096, 1)


def test_a_wide_window_is_refused():
    compressor = zstandard.ZstdCompressor(**parameters(window_log=27, compression_level=3)).compressobj(size=4096)
    frame = bytearray(compressor.compress(bytes(4096)) + compressor.flush())
    if zstandard.get_frame_parameters(frame).window_size <= 4096:  # a single segment: give it a window of 128 MiB
        frame = bytearray(b"\x28\xb5\x2f\xfd" + b"\x40" + b"\x88" + (4096 - 256).to_bytes(2, "little") + frame[7:])
    assert zstandard.get_frame_parameters(bytes(frame)).window_size > 1 << 26
    with pytest.raises(CorruptFile):
        decode(memoryview(bytes(frame)), 4096, 1)


def replace_frame(path, name, frame):
    """The file with another first frame of a tensor, all hashes and places right again but for the raw bytes' own."""
    forgery = Forgery.of(path)
    row, span = forgery.about["tensors"][name], forgery.span(name)
    grown = len(frame) - row["sizes"][0]
    forgery.data[span.start : span.start + row["sizes"][0]] = frame
    row["sizes"][0] = len(frame)
    row["stored"][0] = xxhash.xxh3_128_hexdigest(frame)
    for other, entry in forgery.table.items():
        low, high = entry["data_offsets"]
        if other == name:
            entry.update(shape=[high - low + grown], data_offsets=[low, high + grown])
        elif low >= span.stop:
            entry["data_offsets"] = [low + grown, high + grown]
    return forgery


def test_bombs_under_right_hashes(tmp_path, large):
    path = tmp_path / "book.kv"
    large.write(path, zstd=3, block_bytes=BLOCK)
    for case in ("a bomb", "one byte more", "no frame"):
        frame = FRAMES[case][:4000]
        replace_frame(path, "layers.0.keys", frame).write(tmp_path / "bomb.kv")
        for read in (read_file, verify_file):
            with pytest.raises(CorruptFile, match=r"layers\.0\.keys, block 0 \(file bytes \d+-\d+\): is not a "):
                read(tmp_path / "bomb.kv")
    good = frame_of(bytes(4096))
    replace_frame(path, "layers.0.keys", good).write(tmp_path / "bomb.kv")
    with pytest.raises(CorruptFile, match=r"layers\.0\.keys, block 0 .*: does not match its hash"):
        read_file(tmp_path / "bomb.kv")


def test_a_file_that_would_unfold_to_far_more_than_its_length_is_refused_from_its_header(
    tmp_path, make_sample, monkeypatch
):
    sample = make_sample("float32", n=30000, counts=((30000,) * 3,), d_k=64, d_v=64, sliding=False)
    empty = replace(sample.layers[0], keys=torch.zeros(90000, 64), values=torch.zeros(90000, 64))
    bomb = replace(sample, layers=[empty])
    path = tmp_path / "bomb.kv"
    monkeypatch.setattr(codecs, "ALLOWANCE", 1 << 30)
    bomb.write(path, zstd=1)
    assert path.stat().st_size * 64 < 46_000_000 * 2
    monkeypatch.setattr(codecs, "ALLOWANCE", 1 << 10)
    monkeypatch.setattr(codecs, "EXPANSION", 16)
    with pytest.raises(CorruptFile, match=r"tensors: holds \d+ bytes in \d+, more than \d+: a bomb"):
        read_header(path)
    with pytest.raises(WriteFailed, match=r"readers would take the file for a bomb; leave --zstd out"):
        bomb.write(tmp_path / "other.kv", zstd=1)
    assert [one.name for one in tmp_path.iterdir()] == ["bomb.kv"]


def row(forgery, name="layers.0.keys"):
    return forgery.about["tensors"][name]


FORGED = {
    "sizes of zero": (
        lambda f: row(f)["sizes"].__setitem__(0, 0),
        r"layers\.0\.keys\]\.sizes: is a list, not a list of",
    ),
    "negative size": (lambda f: row(f)["sizes"].__setitem__(0, -5), r"layers\.0\.keys\]\.sizes"),
    "absurd size": (lambda f: row(f)["sizes"].__setitem__(0, 2**40), r"layers\.0\.keys\]\.sizes"),
    "size of truth": (lambda f: row(f)["sizes"].__setitem__(0, True), r"layers\.0\.keys\]\.sizes"),
    "too few sizes": (lambda f: row(f)["sizes"].pop(), r"layers\.0\.keys\]\.sizes"),
    "no sizes": (lambda f: row(f).update(sizes=None), r"layers\.0\.keys\]\.sizes: is null"),
    "shifted sizes": (
        lambda f: row(f)["sizes"].__setitem__(0, row(f)["sizes"][0] + 1),
        r"layers\.0\.keys: the tensor table",
    ),
    "too few stored hashes": (lambda f: row(f)["stored"].pop(), r"layers\.0\.keys\]\.stored"),
    "no stored hashes": (lambda f: row(f).pop("stored"), r"layers\.0\.keys\]\.stored: is missing"),
    "stored hashes of a raw tensor": (lambda f: row(f, "layers.0.offsets").update(stored=[]), r"stored: is not a key"),
    "raw that is not": (lambda f: row(f).update(codec="raw"), r"layers\.0\.keys\]\.stored: is not a key"),
    "row out of order": (lambda f: row(f).update(blocks=row(f).pop("blocks")), r"out of order"),
    "not worth it": (
        lambda f: row(f)["sizes"].__setitem__(slice(None), [BLOCK] * len(row(f)["sizes"])),
        r"layers\.0\.keys: is compressed from \d+ to \d+ bytes: not worth it",
    ),
    "no level": (lambda f: f.about.update(zstd=None), r"metadata zstd: does not go with the codecs"),
    "level 23": (lambda f: f.about.update(zstd=23), r"metadata zstd: is 23"),
    "missing level": (lambda f: f.about.pop("zstd"), r"metadata zstd: is missing"),
    "version 1": (
        lambda f: (f.about.pop("zstd"), f.about.update(format_version=1, oldest_reader=1)),
        r"the file needs 2",
    ),
    "the true type in the table": (
        lambda f: f.table["layers.0.keys"].update(dtype="BF16"),
        r"layers\.0\.keys: the tensor",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_rows_with_right_hashes(tmp_path, large, case):
    path = tmp_path / "book.kv"
    large.write(path, zstd=3, block_bytes=BLOCK)
    forgery = Forgery.of(path)
    assert forgery.bytes() == path.read_bytes()
    edit, match = FORGED[case]
    edit(forgery)
    forgery.write(path)
    with pytest.raises(CorruptFile, match=match):
        read_header(path)


def test_a_level_without_compressed_tensors_is_refused(tmp_path, large):
    path = tmp_path / "book.kv"
    stored_as(large, "int8").write(path)
    forgery = Forgery.of(path)
    forgery.about["zstd"] = 3
    forgery.write(path)
    with pytest.raises(CorruptFile, match=r"metadata zstd: does not go with the codecs"):
        read_header(path)


def test_nothing_that_shrinks_is_a_plain_file(tmp_path, make_sample):
    """A file that zstd does not help is the file that is written without it, byte for byte."""
    sample = make_sample(n=12, counts=((0, 0, 0),), sliding=False, with_tokens=False)
    sample.write(tmp_path / "plain.kv")
    sample.write(tmp_path / "zstd.kv", zstd=3)
    header = read_header(tmp_path / "zstd.kv")
    assert (tmp_path / "plain.kv").read_bytes() == (tmp_path / "zstd.kv").read_bytes()
    assert header.format_version == 1
    assert_same_entries(read_file(tmp_path / "zstd.kv"), sample)


def test_memory_of_writing_and_reading_is_bounded(tmp_path, make_sample):
    """Python's own allocations: frames, blocks and buffers, while tensors are torch's."""
    sample = make_sample("float32", n=40000, counts=((40000,) * 3,), d_k=32, d_v=32, sliding=False)
    path = tmp_path / "book.kv"
    tracemalloc.start()
    sample.write(path, zstd=1, threads=2)
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.reset_peak()
    read_file(path, threads=2)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
