"""What is written is what is read, bit for bit, by our reader and by the safetensors library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import formats
from formats import header, read_file, read_header, verify_file
from formats.entries import ENTRY_FIELDS, INDEX_FIELDS
from formats.grids import SCALE_FIELDS
from formats.partial import Part, read_parts
from formats.source import FileSource, open_source

FIELDS = (*INDEX_FIELDS, *ENTRY_FIELDS)
SPECIFICATION = Path(formats.__file__).with_name("FORMAT.md")


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_round_trip(tmp_path, make_sample, dtype, with_tokens):
    sample = make_sample(dtype, with_tokens=with_tokens)
    path = tmp_path / "book.kv"
    size = sample.write(path)
    contents = read_file(path)
    assert size == path.stat().st_size == contents.header.file_bytes
    assert contents.header.metadata == sample.metadata
    assert len(contents.layers) == 3
    for found, wanted in zip(contents.layers, sample.layers, strict=True):
        for field in FIELDS:
            assert_same(getattr(found, field), getattr(wanted, field))
    if with_tokens:
        assert_same(contents.tokens, sample.tokens)
    else:
        assert contents.tokens is None
    assert read_header(path) == contents.header


def test_any_bit_pattern_of_keys_and_values_survives(tmp_path, make_sample):
    sample = make_sample("bfloat16")
    patterns = torch.arange(2**15 - 120, 2**15, dtype=torch.int32).to(torch.int16)
    sample.layers[0].keys.view(-1)[:84] = patterns[:84].view(torch.bfloat16)  # infinities and NaN payloads
    assert sample.layers[0].keys.isnan().any()
    sample.write(tmp_path / "nan.kv")
    assert_same(read_file(tmp_path / "nan.kv").layers[0].keys, sample.layers[0].keys)


def test_strided_and_grad_tensors_are_stored_by_value(tmp_path, sample):
    from dataclasses import replace

    wide = torch.randn(14, 12).bfloat16()
    sample.layers[0] = replace(sample.layers[0], keys=wide[:, ::2].requires_grad_(), scores=torch.rand(28)[::2])
    sample.write(tmp_path / "strided.kv")
    found = read_file(tmp_path / "strided.kv").layers[0]
    assert_same(found.keys, wide[:, ::2])
    assert_same(found.scores, sample.layers[0].scores)


def test_layer_without_entries(tmp_path, make_sample):
    sample = make_sample(counts=((0, 0, 0), (0, 0, 4)), sliding=False)
    sample.write(tmp_path / "empty.kv")
    layer = read_file(tmp_path / "empty.kv").layers[0]
    assert layer.keys.shape == (0, 6)
    assert layer.offsets.tolist() == [0, 0, 0, 0]
    with safe_open(tmp_path / "empty.kv", framework="pt") as file:
        assert file.get_tensor("layers.0.values").shape == (0, 10)


def test_same_input_gives_same_bytes(tmp_path, sample, with_metadata):
    sample.write(tmp_path / "one.kv")
    sample.write(tmp_path / "two.kv")
    turned = dict(reversed(sample.metadata.method.items()))
    with_metadata(sample, method=turned).write(tmp_path / "three.kv")
    first = (tmp_path / "one.kv").read_bytes()
    assert first == (tmp_path / "two.kv").read_bytes() == (tmp_path / "three.kv").read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_safetensors_reads_the_same(tmp_path, make_sample, dtype):
    sample = make_sample(dtype)
    path = tmp_path / "book.kv"
    sample.write(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["dropkv"])["document"]["name"] == sample.metadata.document.name
        assert_same(file.get_tensor("tokens"), sample.tokens)
        for index, layer in enumerate(sample.layers):
            for field in FIELDS:
                assert_same(file.get_tensor(f"layers.{index}.{field}"), getattr(layer, field))
        assert set(file.keys()) == set(read_header(path).tensors)


def test_index_tensors_come_first_and_data_is_aligned(kv):
    found = read_header(kv)
    names = list(found.tensors)
    assert names[0] == "tokens"
    assert names[1:5] == [f"layers.0.{field}" for field in INDEX_FIELDS]
    assert names[13:] == [f"layers.{index}.{field}" for index in range(3) for field in ENTRY_FIELDS]
    assert found.data_start % 8 == 0
    stops = [0, *(info.stop for info in found.tensors.values())]
    assert [info.start for info in found.tensors.values()] == stops[:-1]


def test_size_is_entries_and_little_else(tmp_path, make_sample):
    sample = make_sample(n=20000, d_k=64, d_v=64, counts=((20000,) * 3,) * 4, sliding=False)
    entries = 4 * 3 * 20000
    size = sample.write(tmp_path / "large.kv")
    assert 1 < size / (entries * (2 * 64 * 2 + 12)) < 1.015


def test_verify_counts_what_it_checked(tmp_path, make_sample):
    sample = make_sample(n=3000, counts=((3000, 1, 2),), d_k=16, d_v=16)
    sample.write(tmp_path / "book.kv", block_bytes=4096)
    report = verify_file(tmp_path / "book.kv")
    assert report.tensors == 1 + 2 * 6
    assert report.data_bytes == report.header.file_bytes - report.header.data_start
    assert report.blocks == sum(-(-info.size // 4096) for info in report.header.tensors.values())
    assert report.header == read_header(tmp_path / "book.kv")


def test_read_header_imports_no_torch(kv):
    code = f"""
import sys, formats
header = formats.read_header({str(kv)!r})
assert header.metadata.document.tokens == 40
assert not {{"torch", "numpy", "safetensors", "transformers"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SPECIFICATION.parents[1])


def test_example_of_the_specification_runs(kv, sample, capsys, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", SPECIFICATION.read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 16
    monkeypatch.setattr(sys, "argv", ["example", str(kv)])
    exec(compile(example, "FORMAT.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"tiny {sample.metadata.document.name} 40 tokens"
    positions = sample.layers[0].positions[5:13].tolist()
    assert lines[2] == f"layer 0, KV head 1: 9 keys, 9 values, from tokens {positions}"
    assert len(lines) == 1 + 3 * 3


def test_specification_names_every_key():
    text = SPECIFICATION.read_text()
    keys = [
        "format_version",
        "oldest_reader",
        "quantization",
        "block_bytes",
        "tensors",
        "hash",
        "codec",
        "sizes",
        "blocks",
    ]
    keys += ["zstd", "stored", *SCALE_FIELDS]
    records = (
        formats.Metadata,
        formats.Quantization,
        formats.ModelIdentity,
        formats.TokenizerIdentity,
        formats.DocumentInfo,
    )
    for record in (*records, formats.BudgetInfo, formats.LayerInfo):
        keys += record.keys()
    assert [key for key in keys if f"`{key}`" not in text and f"`layers.i.{key}`" not in text] == []


class CountingSource:
    """Remembers which bytes were asked for."""

    def __init__(self, inner: FileSource) -> None:
        self.inner, self.size = inner, inner.size
        self.gap, self.longest, self.threads = inner.gap, inner.longest, inner.threads
        self.reads: list[tuple[int, int]] = []

    def read_into(self, offset: int, out: memoryview) -> None:
        self.reads.append((offset, len(out)))
        self.inner.read_into(offset, out)


def test_range_reads_only_the_blocks_that_cover_it(tmp_path, make_sample):
    sample = make_sample("float32", n=3000, counts=((3000, 1, 2),), d_k=16, d_v=16)
    path = tmp_path / "book.kv"
    sample.write(path, block_bytes=4096)
    wanted = bits(sample.layers[0].keys).numpy().tobytes()
    size = len(wanted)
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(0, size + 1, (60, 2), generator=generator).sort(dim=1).values.tolist()
    edges = [(0, 0), (0, 1), (0, size), (4096, 8192), (4095, 4097), (size - 1, size), (5000, 6000), (size, size)]
    with open_source(path) as file:
        source = CountingSource(file)
        found = header.parse(source)
        info = found.tensors["layers.0.keys"]
        for start, stop in pairs + edges:
            source.reads.clear()
            out = bytearray(stop - start)
            read_parts(source, found, [(Part(info, start, stop), memoryview(out))], threads=1)
            assert bytes(out) == wanted[start:stop]
            low = found.data_start + info.start + start // 4096 * 4096
            high = found.data_start + info.start + min(size, -(-stop // 4096) * 4096)
            assert all(low <= offset and offset + length <= high for offset, length in source.reads)


def test_damage_outside_the_range_does_not_matter_inside_it_does(tmp_path, make_sample):
    sample = make_sample("float32", n=3000, counts=((3000, 1, 2),), d_k=16, d_v=16)
    path = tmp_path / "book.kv"
    sample.write(path, block_bytes=4096)
    found = read_header(path)
    info = found.tensors["layers.0.keys"]
    raw = bytearray(path.read_bytes())
    raw[found.data_start + info.start + 3 * 4096 + 17] ^= 4
    path.write_bytes(raw)
    with open_source(path) as source:
        out = memoryview(bytearray(100))
        read_parts(source, found, [(Part(info, 2 * 4096, 2 * 4096 + 100), out)], threads=1)
        assert bytes(out) == bits(sample.layers[0].keys).numpy().tobytes()[8192:8292]
        with pytest.raises(formats.CorruptFile, match=r"layers\.0\.keys, block 3 \(file bytes \d+-\d+\)"):
            read_parts(source, found, [(Part(info, 4 * 4096 - 100, 4 * 4096), out)], threads=1)
