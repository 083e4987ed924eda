"""Quantised entries against the formulas of FORMAT.md written out plainly, their error bounds, and what a reader refuses."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from formats import CorruptFile, LayerEntries, WriteFailed, read_file, read_header, verify_file
from formats.grids import KINDS, SCALE_FIELDS
from formats.quantized import count_groups, describe, entry_bytes, group_rows, quantize, restore
from tests.formats.conftest import Forgery

CPU = torch.device("cpu")
KINDS_AND_TOPS = [("int8", 255), ("int4", 15), ("fp8", 448)]


def layer_of(keys, values, heads):
    """A layer with these entries, `heads` the entries of each KV head; what is not about keys and values is plain."""
    entries = keys.shape[0]
    offsets = torch.tensor([0, *torch.tensor(heads).cumsum(0).tolist()], dtype=torch.int32)
    line = torch.arange(entries, dtype=torch.int32)
    return LayerEntries(keys, values, offsets, line, line + 1, torch.zeros(entries))


def random_layer(heads, d_k, d_v, *, seed=0, dtype=torch.float32, spread=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(sum(heads), d, generator=generator) * spread + shift for d in (d_k, d_v))
    return layer_of(keys.to(dtype), values.to(dtype), heads)


def coded(layer, kind, **groups):
    about = replace(describe(kind, [layer.offsets.tolist()]), **groups)
    about = replace(about, key_groups=(count_groups(layer.offsets.tolist(), about.key_group),))
    return quantize(layer, about), about


def restored(layer, about, d_k, d_v, dtype=torch.float32):
    return restore(layer, about, d_k, d_v, CPU, dtype)


def bfloat16_beside(x, *, up):
    """The nearest bfloat16 number that is not below (above) x, by stepping through the numbers there are."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0] & 0xFFFF0000
    steps = [struct.unpack("<f", struct.pack("<I", (bits + step * 65536) & 0xFFFFFFFF))[0] for step in (-1, 0, 1)]
    return min(y for y in steps if y >= x) if up else max(y for y in steps if y <= x)


def plain_codes(group, kind, top):
    """Codes and restored numbers of one grid, one number after the other: FORMAT.md's formulas in float64.

    Results of float32 arithmetic equal them unless an entry lies half way between two codes, which random ones do not.
    """
    low, high = min(group), max(group)
    zero = 0.0 if kind == "fp8" else bfloat16_beside(low, up=False)
    reach = max(high, -low) if kind == "fp8" else high - zero
    scale = max(bfloat16_beside(reach / top, up=True), 2.0**-126) if reach > 0 else 0.0
    codes = []
    for x in group:
        if scale == 0:
            codes.append(0.0)
        elif kind == "fp8":
            codes.append(nearest_e4m3(max(-448.0, min(448.0, x / scale))))
        else:
            codes.append(float(max(0, min(top, round((x - zero) / scale)))))
    return codes, [zero + scale * code for code in codes]


E4M3 = sorted(
    {math.ldexp(8 + m, e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
    | {math.ldexp(m, -9) for m in range(8)}
)


def nearest_e4m3(x):
    return math.copysign(min(E4M3, key=lambda y: abs(y - abs(x))), x)


def as_numbers(codes, kind, channels):
    """Stored codes [rows, width] as numbers [rows, channels]."""
    if kind == "int4":
        half = (channels + 1) // 2
        return [[row[j] & 15 if j < half else row[j - half] >> 4 for j in range(channels)] for row in codes.tolist()]
    return codes.float().tolist()


@pytest.mark.parametrize(("kind", "top"), KINDS_AND_TOPS)
@pytest.mark.parametrize(("d_k", "d_v"), [(6, 10), (7, 5), (8, 1)])
def test_codes_and_numbers_are_those_of_the_formulas(kind, top, d_k, d_v):
    heads = (5, 0, 11, 1)
    layer = random_layer(heads, d_k, d_v, spread=3.0, shift=0.7)
    stored, about = coded(layer, kind, key_group=4, value_group=3)
    found = restored(stored, about, d_k, d_v)
    assert about.key_groups == (2 + 0 + 3 + 1,)
    codes = as_numbers(stored.keys, kind, d_k)
    start = 0
    for count in heads:
        for first in range(start, start + count, 4):
            rows = range(first, min(first + 4, start + count))
            for channel in range(d_k):
                wanted = plain_codes([float(layer.keys[row, channel]) for row in rows], kind, top)
                assert [codes[row][channel] for row in rows] == wanted[0]
                assert found.keys[rows.start : rows.stop, channel].tolist() == pytest.approx(
                    wanted[1], rel=1e-6, abs=1e-7
                )
        start += count
    codes = as_numbers(stored.values, kind, d_v)
    for row in range(sum(heads)):
        for first in range(0, d_v, 3):
            columns = slice(first, min(first + 3, d_v))
            wanted = plain_codes(layer.values[row, columns].tolist(), kind, top)
            assert codes[row][columns] == wanted[0]
            assert found.values[row, columns].tolist() == pytest.approx(wanted[1], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_dtypes_and_bytes(kind):
    layer = random_layer((300, 20), 64, 128)
    stored, about = coded(layer, kind)
    chosen = KINDS[kind]
    groups = -(-300 // chosen.key_group) + 1
    assert stored.keys.shape == (320, 32 if kind == "int4" else 64)
    assert str(stored.keys.dtype) == str(stored.values.dtype) == f"torch.{chosen.codes}"
    assert stored.key_scales.shape == (groups, 64) and stored.key_scales.dtype == torch.bfloat16
    assert stored.value_scales.shape == (320, 128 // chosen.value_group)
    assert (stored.key_zeros is None, stored.value_zeros is None) == (kind == "fp8",) * 2
    assert about.key_groups == (groups,)
    parts = [getattr(stored, field) for field in ("keys", "values", *SCALE_FIELDS)]
    found = sum(part.numel() * part.element_size() for part in parts if part is not None)
    assert 1 <= found / (320 * entry_bytes(kind, 64, 128)) < 1.1  # heads do not end where groups do


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    heads=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    d=st.integers(1, 9),
    group=st.integers(1, 10),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([0.0, 2.0**-130, 1e-30, 1e-3, 1.0, 300.0, 2.0**100]),
    shift=st.sampled_from([0.0, 1.0, -77.0]),
    seed=st.integers(0, 5),
)
def test_no_number_is_further_than_half_a_step_from_its_entry(kind, heads, d, group, dtype, size, shift, seed):
    if dtype == torch.float16:
        size = min(size, 300.0)
    layer = random_layer(heads, d, d, seed=seed, dtype=dtype, spread=size, shift=shift * size)
    stored, about = coded(layer, kind, key_group=group, value_group=min(group, d))
    found = restored(stored, about, d, d)
    rows = group_rows(layer.offsets.tolist(), group)
    assert rows[-1][1] == about.key_groups[0] == len(stored.key_scales)
    steps = torch.cat(
        [
            stored.key_scales[start:stop].float().repeat_interleave(group, 0)[:count]
            for (start, stop), count in zip(rows, heads, strict=True)
        ]
    ).double()
    wide = stored.value_scales.double().repeat_interleave(min(group, d), 1)[:, :d]
    for step, got, want in ((steps, found.keys, layer.keys), (wide, found.values, layer.values)):
        got, want = got.double(), want.double()
        # Of e4m3 half a step is up to 1/16 of the number, with three bits behind its first one, and 2**-10 at the bottom.
        bound = torch.maximum(want.abs() / 16, step * 2.0**-10) if kind == "fp8" else step / 2
        assert ((got - want).abs() <= bound * (1 + 1e-5) + want.abs() * 1e-6 + step * 2e-5).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [1, 7, 8, 9, 24])
def test_a_prefix_of_a_head_restores_to_the_same_numbers(kind, kept):
    heads = (24, 30)
    layer = random_layer(heads, 10, 6)
    stored, about = coded(layer, kind, key_group=8, value_group=4)
    whole = restored(stored, about, 10, 6)
    rows = group_rows(layer.offsets.tolist(), 8)
    entries = torch.cat([torch.arange(kept), 24 + torch.arange(kept)])
    grids = torch.cat([start + torch.arange(-(-kept // 8)) for start, _ in rows])
    part = replace(
        layer_of(stored.keys[entries], stored.values[entries], (kept, kept)),
        key_scales=stored.key_scales[grids],
        key_zeros=None if stored.key_zeros is None else stored.key_zeros[grids],
        value_scales=stored.value_scales[entries],
        value_zeros=None if stored.value_zeros is None else stored.value_zeros[entries],
    )
    smaller = restored(part, replace(about, key_groups=(len(grids),)), 10, 6)
    assert torch.equal(smaller.keys, whole.keys[entries])
    assert torch.equal(smaller.values, whole.values[entries])


@pytest.mark.parametrize("kind", KINDS)
def test_constant_zero_and_extreme_entries(kind):
    values = torch.tensor(
        [[0.0] * 4, [-0.0] * 4, [3.0] * 4, [-5.5] * 4, [1e-45, 0, 0, 0], [2.0**120, -(2.0**120), 1, 0]]
    )
    layer = layer_of(values.clone(), values.clone(), (6,))
    stored, about = coded(layer, kind, key_group=1, value_group=4)
    found = restored(stored, about, 4, 4)
    assert torch.equal(found.keys[:4].abs(), values[:4].abs()) or kind == "fp8"
    assert torch.isfinite(found.keys).all() and torch.isfinite(found.values).all()
    step = 2.0**121 / 15 if kind == "int4" else 2.0**116
    assert (found.values - values).abs().max() <= step / 2 * 1.01
    assert (found.values[:2] == 0).all()


def test_fp8_reaches_its_largest_code_and_never_wraps():
    """Above 448 there is nothing but the code that is no number: a scale rounded up keeps every entry below it."""
    for seed in range(20):
        layer = random_layer((64,), 8, 8, seed=seed, spread=100.0)
        stored, about = coded(layer, "fp8")
        assert not ((stored.keys.view(torch.uint8) & 0x7F) == 0x7F).any()
        assert stored.keys.float().abs().max() <= 448
        assert torch.isfinite(restored(stored, about, 8, 8).keys).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 2.0**121])
@pytest.mark.parametrize("field", ["keys", "values"])
def test_what_no_grid_covers_is_refused_in_words(kind, wrong, field):
    layer = random_layer((5, 3), 4, 4)
    getattr(layer, field)[6, 2] = wrong
    with pytest.raises(WriteFailed, match=r"not finite, or above 2\*\*120, cannot be quantised; use --kv-dtype same"):
        coded(layer, kind)


def test_float16_that_would_overflow_ends_at_its_largest():
    layer = layer_of(torch.full((3, 2), 65504.0), torch.tensor([[65504.0, -65504.0]] * 3), (3,))
    for kind in KINDS:
        stored, about = coded(layer, kind)
        found = restored(stored, about, 2, 2, torch.float16)
        assert torch.isfinite(found.keys).all() and torch.isfinite(found.values).all()
        assert found.values[0, 0] > 65000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_restoring_rounds_once_from_float32(dtype):
    layer = random_layer((9, 4), 6, 6)
    for kind in KINDS:
        stored, about = coded(layer, kind)
        assert torch.equal(restored(stored, about, 6, 6, dtype).keys, restored(stored, about, 6, 6).keys.to(dtype))


def test_all_codes_of_fp8_restore_to_what_torch_says():
    """The quick conversion on a CPU, against torch's own."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    layer = replace(
        layer_of(codes.view(torch.float8_e4m3fn)[:, None], codes.view(torch.float8_e4m3fn)[:, None], (254,)),
        key_scales=torch.ones(2, 1, dtype=torch.bfloat16),
        value_scales=torch.full((254, 1), 0.5, dtype=torch.bfloat16),
    )
    found = restored(layer, describe("fp8", [[0, 254]]), 1, 1)
    assert torch.equal(found.keys, layer.keys.float())
    assert torch.equal(found.values, layer.keys.float() * 0.5)


def quantized_sample(sample, kind):
    about = describe(kind, [layer.offsets.tolist() for layer in sample.layers])
    return replace(
        sample,
        metadata=replace(sample.metadata, quantization=about),
        layers=[quantize(layer, about) for layer in sample.layers],
    )


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def quantized(sample, kind):
    return quantized_sample(sample, kind)


def test_what_is_written_is_what_is_read(tmp_path, quantized, kind):
    path = tmp_path / "book.kv"
    size = quantized.write(path)
    contents = read_file(path)
    assert (contents.header.format_version, contents.header.oldest_reader, contents.header.zstd) == (2, 2, None)
    assert contents.header.metadata == quantized.metadata and contents.header.file_bytes == size
    for found, wanted in zip(contents.layers, quantized.layers, strict=True):
        for field in ("keys", "values", *SCALE_FIELDS):
            got, want = getattr(found, field), getattr(wanted, field)
            assert (got is None) == (want is None)
            if want is not None:
                assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    with safe_open(path, framework="pt") as file:
        assert torch.equal(
            file.get_tensor("layers.1.keys").view(torch.uint8), quantized.layers[1].keys.view(torch.uint8)
        )
        assert torch.equal(file.get_tensor("layers.1.key_scales"), quantized.layers[1].key_scales)
    again = tmp_path / "again.kv"
    quantized.write(again)
    assert again.read_bytes() == path.read_bytes()
    report = verify_file(path)
    assert report.data_bytes == size - report.header.data_start


def test_plain_files_say_version_1(kv):
    header = read_header(kv)
    assert (header.format_version, header.oldest_reader, header.metadata.quantization) == (1, 1, None)


def test_grids_stand_before_codes_and_after_the_index(tmp_path, quantized):
    quantized.write(tmp_path / "book.kv")
    names = list(read_header(tmp_path / "book.kv").tensors)
    fields = [name.rpartition(".")[2] for name in names]
    first_grid, first_code = fields.index("key_scales"), fields.index("keys")
    assert not {"keys", "values", *SCALE_FIELDS} & set(fields[:first_grid])
    assert set(fields[first_grid:first_code]) <= set(SCALE_FIELDS)
    assert set(fields[first_code:]) == {"keys", "values"}


def test_size_is_codes_grids_and_little_else(tmp_path, make_sample):
    plain = make_sample(n=9000, d_k=64, d_v=64, counts=((9000,) * 3,) * 2, sliding=False)
    for kind, most in (("int8", 136 + 8), ("int4", 80 + 8), ("fp8", 131 + 8)):
        quantized = quantized_sample(plain, kind)
        size = quantized.write(tmp_path / f"{kind}.kv")
        parts = [getattr(one, field) for one in quantized.layers for field in ("keys", "values", *SCALE_FIELDS)]
        stored = sum(part.numel() * part.element_size() for part in parts if part is not None)
        assert 1 < size / (stored + 2 * 3 * 9000 * 12) < 1.015
        assert stored / (2 * 3 * 9000) < most


def poke(forgery, name, at, value):
    start = forgery.span(name).start
    forgery.data[start + at] = value
    forgery.rehash()


def forge(tmp_path, quantized):
    path = tmp_path / "book.kv"
    quantized.write(path, overwrite=True)
    return path, Forgery.of(path)


def refuse(path, match, kinds=(read_file, verify_file)):
    for read in kinds:
        with pytest.raises(CorruptFile, match=match):
            read(path)


@pytest.mark.parametrize(
    ("field", "bits", "match"),
    [
        ("key_scales", 0x7F80, "which are not a scale"),  # infinity
        ("key_scales", 0x7FC0, "which are not a scale"),  # no number
        ("value_scales", 0xBF80, "which are not a scale"),  # -1
        ("value_scales", 0x8000, "which are not a scale"),  # -0
        ("key_scales", 0x0001, "which are not a scale"),  # subnormal
        ("key_scales", 0x7A81, "which are not a scale"),  # above 2**118
        ("key_zeros", 0xFF80, "which are not a zero of a grid"),
        ("value_zeros", 0x7FFF, "which are not a zero of a grid"),
        ("value_zeros", 0x8000, "which are not a zero of a grid"),
        ("key_zeros", 0x7C01, "which are not a zero of a grid"),
    ],
)
def test_grids_that_are_none_under_right_hashes(tmp_path, sample, field, bits, match):
    path, forgery = forge(tmp_path, quantized_sample(sample, "int8"))
    name = f"layers.1.{field}"
    start = forgery.span(name).start
    forgery.data[start + 2 : start + 4] = bits.to_bytes(2, "little")
    forgery.rehash()
    forgery.write(path)
    refuse(path, rf"layers\.1\.{field}, row \d+, \d+: has the bits {bits:#x}, {match}")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_under_right_hashes(tmp_path, sample, code):
    path, forgery = forge(tmp_path, quantized_sample(sample, "fp8"))
    poke(forgery, "layers.0.values", 23, code)
    forgery.write(path)
    refuse(path, rf"layers\.0\.values, row 2, 3: has the bits {code:#x}, which are not a number")


def test_hidden_bits_behind_the_last_channel_are_zero(tmp_path, make_sample):
    path, forgery = forge(tmp_path, quantized_sample(make_sample(d_k=7, d_v=10), "int4"))
    read_file(path)
    poke(forgery, "layers.0.keys", 5 * 4 + 3, 0x10)
    forgery.write(path)
    refuse(path, r"layers\.0\.keys, entry 5: has a code behind its last channel")


def test_hidden_bits_are_looked_for_in_every_block(tmp_path, make_sample):
    """Rows of five bytes do not end where blocks of 4096 do."""
    quantized = quantized_sample(make_sample(n=3000, d_k=9, d_v=4, counts=((3000, 10, 0),)), "int4")
    path = tmp_path / "book.kv"
    quantized.write(path, block_bytes=4096)
    forgery = Forgery.of(path)
    for entry in (0, 818, 819, 820, 1638, 3009):
        place = forgery.span("layers.0.keys").start + 5 * entry + 4
        before = forgery.data[place]
        forgery.data[place] |= 0xF0
        forgery.rehash()
        forgery.write(path)
        refuse(path, rf"layers\.0\.keys, entry {entry}: has a code behind", (read_file,))
        forgery.data[place] = before


FORGED = {
    "another count of groups": (lambda q: q.update(key_groups=[3, 3, 3]), r"layers\.0\.key_scales: the tensor table"),
    "too many groups": (
        lambda q: q.update(key_groups=[99, 3, 3]),
        r"quantization\.key_groups\[0\]: is 99, not a whole",
    ),
    "groups of truth": (lambda q: q.update(key_groups=[True, 3, 3]), r"key_groups\[0\]: is true"),
    "too few layers": (lambda q: q.update(key_groups=[2, 3]), r"key_groups: is a list, not a list of 3"),
    "no group": (lambda q: q.update(key_group=0), r"quantization\.key_group: is 0"),
    "other kind": (lambda q: q.update(kind="int3"), r"quantization\.kind: is the text 'int3'"),
    "one more key": (lambda q: q.update(more=1), r"quantization\.more: is not a key"),
    "wider groups": (lambda q: q.update(value_group=1), r"layers\.0\.value_scales: the tensor table"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_descriptions_with_right_hashes(tmp_path, sample, case):
    path, forgery = forge(tmp_path, quantized_sample(sample, "int8"))
    edit, match = FORGED[case]
    edit(forgery.about["quantization"])
    forgery.write(path)
    refuse(path, match, (read_header,))


def test_groups_that_do_not_go_with_the_heads(tmp_path, make_sample):
    """As many scales as another split of the entries among heads would have."""
    quantized = quantized_sample(make_sample(counts=((5, 9, 0),), sliding=False), "int4")
    path, forgery = forge(tmp_path, quantized)
    offsets = torch.tensor([0, 14, 14, 14], dtype=torch.int32)
    forgery.put("layers.0.offsets", offsets)
    forgery.put("layers.0.positions", torch.arange(14).int())
    forgery.put("layers.0.admit", torch.ones(14).int())
    forgery.rehash()
    forgery.write(path)
    refuse(path, r"quantization\.key_groups\[0\]: is 2, the 3 heads have 1 groups of 32 entries")


def test_versions_must_go_with_the_content(tmp_path, kv, forgery, quantized):
    forgery.about.update(format_version=2)
    forgery.write(kv)
    refuse(kv, r"metadata format_version: is 2, and the file needs 1", (read_header,))
    path, quantised = forge(tmp_path, quantized)
    quantised.about.pop("zstd")
    quantised.about.update(format_version=1, oldest_reader=1)
    quantised.write(path)
    refuse(path, r"metadata oldest_reader: is 1, and the file needs 2", (read_header,))


def test_writer_refuses_codes_that_do_not_go_with_the_metadata(tmp_path, quantized, sample):
    path = tmp_path / "none.kv"
    with pytest.raises(WriteFailed, match="the metadata implies"):
        replace(quantized, metadata=sample.metadata).write(path)
    with pytest.raises(WriteFailed, match="the metadata implies"):
        replace(sample, metadata=quantized.metadata).write(path)
    quantized.layers[0].key_scales[0, 0] = float("nan")
    with pytest.raises(WriteFailed, match=r"layers\.0\.key_scales, row 0, 0: cannot be stored: has the bits"):
        quantized.write(path)
    assert list(tmp_path.iterdir()) == []
