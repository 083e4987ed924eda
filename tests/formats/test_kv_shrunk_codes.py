"""A smaller budget of quantised and compressed files: the same numbers as in the whole file, read in part or written anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from formats import CorruptFile, read_file, read_header, shrink_file, verify_file
from formats.grids import KINDS, SCALE_FIELDS
from formats.quantized import describe, quantize, restore

BLOCK = 4096
CPU = torch.device("cpu")


@pytest.fixture(params=["same", *KINDS])
def stored(request, make_sample, tmp_path):
    """Files of a sample with several groups and blocks in each head, raw and compressed."""
    sample = make_sample("float32", n=1200, counts=((1200, 0, 333), (70, 900, 1)), d_k=20, d_v=40)
    if request.param != "same":
        about = describe(request.param, [layer.offsets.tolist() for layer in sample.layers])
        layers = [quantize(layer, about) for layer in sample.layers]
        sample = replace(sample, metadata=replace(sample.metadata, quantization=about), layers=layers)
    for name, level in (("raw", None), ("zstd", 3)):
        sample.write(tmp_path / f"{name}.kv", zstd=level, block_bytes=BLOCK)
    return sample


def at(kept):
    return lambda metadata: replace(metadata.budget, asked=kept, kept=kept)


def numbers(contents):
    """Keys and values of every layer as they are attended to, with what says which entries they are."""
    about = contents.header.metadata.quantization
    found = []
    for layer, shape in zip(contents.layers, contents.header.metadata.layers, strict=True):
        if about is not None:
            layer = replace(restore(layer, about, shape.d_k, shape.d_v, CPU, torch.float32), scores=layer.scores)
        found.append(layer)
    return found


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("kept", [1, 5, 11, 12])
def test_smaller_budgets_have_the_numbers_of_the_whole_file(stored, tmp_path, codec, kept):
    path, small = tmp_path / f"{codec}.kv", tmp_path / "small.kv"
    whole = numbers(read_file(path))
    part = read_file(path, choose=at(kept))
    report = shrink_file(path, small, at(kept), writer="test")
    verify_file(small)
    header = read_header(small)
    assert report.file_bytes == small.stat().st_size and header.zstd == read_header(path).zstd
    assert header.metadata == replace(part.header.metadata, writer="test")
    again = read_file(small)
    for field in ("keys", "values", *SCALE_FIELDS):
        for one, two in zip(part.layers, again.layers, strict=True):
            first, second = getattr(one, field), getattr(two, field)
            assert (first is None) == (second is None)
            assert first is None or torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    for found, wanted, shape in zip(numbers(part), whole, header.metadata.layers, strict=True):
        mine = wanted.admit <= kept if shape.kind == "full" else torch.ones_like(wanted.admit, dtype=torch.bool)
        assert found.positions.tolist() == wanted.positions[mine].tolist()
        assert torch.equal(found.keys, wanted.keys[mine]) and torch.equal(found.values, wanted.values[mine])


def test_shrinking_twice_or_at_once_gives_the_same_bytes(stored, tmp_path):
    for codec in ("raw", "zstd"):
        shrink_file(tmp_path / f"{codec}.kv", tmp_path / "eight.kv", at(8), writer="test", overwrite=True)
        shrink_file(tmp_path / "eight.kv", tmp_path / "twice.kv", at(3), writer="test", overwrite=True)
        shrink_file(tmp_path / f"{codec}.kv", tmp_path / "once.kv", at(3), writer="test", overwrite=True)
        assert (tmp_path / "twice.kv").read_bytes() == (tmp_path / "once.kv").read_bytes()


def test_damage_in_what_is_shrunk_is_the_old_files(stored, tmp_path):
    for codec in ("raw", "zstd"):
        path = tmp_path / f"{codec}.kv"
        header, raw = read_header(path), bytearray(path.read_bytes())
        info = header.tensors["layers.0.values"]
        raw[header.data_start + info.start + 5] ^= 16
        path.write_bytes(raw)
        with pytest.raises(CorruptFile, match=rf"{codec}\.kv: layers\.0\.values, block 0 .*does not match its hash"):
            shrink_file(path, tmp_path / "small.kv", at(5), writer="test")
        assert not (tmp_path / "small.kv").exists()
