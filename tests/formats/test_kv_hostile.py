"""No changed, missing, added or forged byte passes; every refusal names the file, a place and a fix."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from formats import CorruptFile, FormatError, UnsupportedVersion, read_file, read_header, verify_file


def refuse(path: Path, kind: type[FormatError] = FormatError, match: str = "", read=read_file) -> str:
    """The one-line message with which the file is refused."""
    with pytest.raises(kind) as caught:
        read(path)
    assert isinstance(caught.value, FormatError)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message and len(message) < len(str(path)) + 500
    assert caught.value.exit_code == 1
    assert "; " in message  # the fix
    assert re.search(match, message), message
    return message


def test_a_flipped_bit_anywhere_is_noticed(kv):
    raw = kv.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    rng = random.Random(7)
    places = [*range(60), start - 1, *rng.sample(range(60, start), 500), *rng.sample(range(start, len(raw)), 400)]
    for place in places:
        damaged = bytearray(raw)
        damaged[place] ^= 1 << rng.randrange(8)
        kv.write_bytes(damaged)
        refuse(kv)
        if place < start:
            refuse(kv, read=read_header)
    kv.write_bytes(raw)
    read_file(kv)


def test_damage_is_placed(kv):
    raw = bytearray(kv.read_bytes())
    header = read_header(kv)
    for name, info in header.tensors.items():
        damaged = bytearray(raw)
        damaged[header.data_start + info.start] ^= 128
        kv.write_bytes(damaged)
        for read in (read_file, verify_file):
            refuse(kv, CorruptFile, rf"{re.escape(name)}, block 0 .*does not match its hash.*download it again", read)


def test_truncation_anywhere_is_noticed(kv):
    raw = kv.read_bytes()
    header = read_header(kv)
    edges = {header.data_start + info.start for info in header.tensors.values()} | {header.data_start, 8, 9, 48, 49}
    cuts = {cut + step for cut in edges for step in (-1, 0, 1)} | set(random.Random(3).sample(range(len(raw)), 200))
    for cut in sorted(cuts):
        kv.write_bytes(raw[:cut])
        message = refuse(kv)
        refuse(kv, read=read_header)
        assert "end" in message if cut > 16 else "short" in message or "end" in message or "empty" in message


@pytest.mark.parametrize("tail", [b"\0", b" ", b"x" * 5000])
def test_trailing_bytes_are_noticed(kv, tail):
    kv.write_bytes(kv.read_bytes() + tail)
    refuse(kv, CorruptFile, rf"{len(tail)} bytes follow the last tensor", read_header)


def test_an_untouched_forgery_is_a_good_file(kv, forgery):
    """The forger follows FORMAT.md on its own: its bytes are the writer's."""
    raw = kv.read_bytes()
    forgery.rehash()
    assert forgery.bytes() == raw


def put_index(forgery, name, at, value):
    dtype = torch.float32 if name.endswith("scores") else torch.int32
    tensor = torch.frombuffer(bytearray(forgery.data[forgery.span(name)]), dtype=dtype)
    tensor[at] = value
    forgery.put(name, tensor)


@pytest.mark.parametrize(
    ("name", "at", "value", "match"),
    [
        ("tokens", 4, -1, r"tokens, element 4: is -1"),
        ("layers.0.offsets", 0, 1, r"layers\.0\.offsets: run from 1"),
        ("layers.0.offsets", 3, 13, r"layers\.0\.offsets: run from 0 to 13, not from 0 to the 14 entries"),
        ("layers.0.offsets", 1, -5, r"layers\.0\.offsets, head 0: fall from 0 to -5"),
        ("layers.1.offsets", 1, 15, r"layers\.1\.offsets, head 1: fall from 15 to 14"),
        ("layers.0.positions", 6, 40, r"layers\.0\.positions, head 1, entry 1: is 40, not in 0 to 39"),
        ("layers.0.positions", 0, -1, r"layers\.0\.positions, head 0, entry 0: is -1"),
        ("layers.0.admit", 5, 0, r"layers\.0\.admit, head 1, entry 0: is 0, not in 1 to 12"),
        ("layers.0.admit", 13, 13, r"layers\.0\.admit, head 1, entry 8: is 13, not in 1 to 12"),
        ("layers.2.admit", 0, 1, r"layers\.2\.admit, head 0, entry 1: falls from 1 to 0"),
        ("layers.1.scores", 20, float("nan"), r"layers\.1\.scores, head 2, entry 6: is nan"),
        ("layers.1.scores", 0, float("-inf"), r"layers\.1\.scores, head 0, entry 0: is -inf"),
    ],
)
def test_wrong_numbers_under_right_hashes(kv, forgery, name, at, value, match):
    put_index(forgery, name, at, value)
    forgery.rehash()
    forgery.write(kv)
    refuse(kv, CorruptFile, match)
    refuse(kv, CorruptFile, match, verify_file)


def test_repeated_position_and_unsorted_admit_under_right_hashes(kv, forgery, sample):
    positions = sample.layers[1].positions.clone()
    positions[13] = positions[7]
    forgery.put("layers.1.positions", positions)
    forgery.rehash()
    forgery.write(kv)
    refuse(kv, CorruptFile, rf"layers\.1\.positions, head 1: position {int(positions[7])} occurs twice")
    forgery.put("layers.1.positions", sample.layers[1].positions)
    forgery.put("layers.1.admit", torch.cat([torch.arange(7, 0, -1)] * 3).int())
    forgery.rehash()
    forgery.write(kv)
    refuse(kv, CorruptFile, r"layers\.1\.admit, head 0, entry 1: falls from 7 to 6")


def test_wrong_hash_over_right_structure(kv, forgery):
    forgery.about["tensors"]["layers.1.values"]["blocks"][0] = "0" * 32
    forgery.write(kv)
    read_header(kv)
    refuse(kv, CorruptFile, r"layers\.1\.values, block 0")


def first_row(forgery):
    return forgery.about["tensors"]["layers.0.keys"]


# name -> edit of a good file's parts (hashes of the header are right again afterwards), what the message says
FORGED = {
    "offsets overlap": (
        lambda f: f.table["layers.0.admit"].update(data_offsets=[0, 56]),
        r"layers\.0\.admit: the tensor table",
    ),
    "offsets out of range": (
        lambda f: f.table["layers.2.values"].update(data_offsets=[0, 2**62]),
        r"layers\.2\.values",
    ),
    "negative offsets": (lambda f: f.table["tokens"].update(data_offsets=[-8, 152]), r"tokens: the tensor table"),
    "offsets are truth values": (lambda f: f.table["tokens"].update(data_offsets=[False, 160]), r"tokens"),
    "wrong dtype": (lambda f: f.table["layers.0.keys"].update(dtype="F16"), r"layers\.0\.keys: .*F16.*implies.*BF16"),
    "wrong shape": (lambda f: f.table["layers.0.keys"].update(shape=[12, 7]), r"layers\.0\.keys: .*\[12,7\].*\[14,6\]"),
    "shape of fractions": (lambda f: f.table["layers.0.keys"].update(shape=[14.0, 6]), r"layers\.0\.keys"),
    "extra key of a tensor": (lambda f: f.table["layers.0.keys"].update(more=1), r"layers\.0\.keys"),
    "tensor is no object": (lambda f: f.table.update(tokens=7), r"tokens"),
    "extra tensor": (
        lambda f: f.table.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        r"tensor table: holds 'x'",
    ),
    "missing tensor": (lambda f: f.table.pop("layers.1.scores"), r"tensor table: lacks layers\.1\.scores"),
    "missing row": (lambda f: f.about["tensors"].pop("layers.1.scores"), r"metadata tensors: lacks layers\.1\.scores"),
    "tokens without row": (lambda f: f.about["tensors"].pop("tokens"), r"tensor table: holds 'tokens'"),
    "tensors out of order": (lambda f: f.table.update(tokens=f.table.pop("tokens")), r"tensor table: is out of order"),
    "tensors is a list": (lambda f: f.about.update(tensors=[]), r"metadata tensors"),
    "too few hashes": (lambda f: first_row(f).update(blocks=[]), r"layers\.0\.keys\]\.blocks"),
    "too many hashes": (lambda f: first_row(f).update(blocks=["0" * 32] * 2), r"a list of 1 hashes"),
    "hash in capitals": (lambda f: first_row(f).update(blocks=["A" * 32]), r"layers\.0\.keys\]\.blocks"),
    "hash is a number": (lambda f: first_row(f).update(blocks=[0]), r"layers\.0\.keys\]\.blocks"),
    "sizes in a raw tensor": (lambda f: first_row(f).update(sizes=[168]), r"layers\.0\.keys\]\.sizes"),
    "row without codec": (lambda f: first_row(f).pop("codec"), r"layers\.0\.keys\]\.codec: is missing"),
    "row out of order": (lambda f: first_row(f).update(codec=first_row(f).pop("codec")), r"out of order"),
    "block of 3 bytes": (lambda f: f.about.update(block_bytes=3), r"block_bytes: is 3, not a whole number from"),
    "block of 5000 bytes": (lambda f: f.about.update(block_bytes=5000), r"block_bytes: is 5000, not a power of two"),
    "absurd entries": (lambda f: f.about["layers"][0].update(entries=2**40), r"layers\[0\]\.entries"),
    "more entries than tokens": (lambda f: f.about["layers"][0].update(entries=121), r"layers\[0\]\.entries: is 121"),
    "other entries": (lambda f: f.about["layers"][0].update(entries=13), r"layers\.0\.positions: the tensor table"),
    "absurd heads": (lambda f: f.about["layers"][0].update(kv_heads=2**31), r"layers\[0\]\.kv_heads"),
    "absurd layers": (lambda f: f.about.update(layers=f.about["layers"][:1] * 1025), r"metadata layers: .* 1 to 1024"),
    "no layers": (lambda f: f.about.update(layers=[]), r"metadata layers"),
    "absurd tokens": (lambda f: f.about["document"].update(tokens=2**31), r"document\.tokens"),
    "huge tokens": (
        lambda f: f.about["document"].update(tokens=2**31 - 1, whole_tokens=2**31 - 1),
        r"tokens: the tensor table",
    ),
    "cut to more than all": (lambda f: f.about["document"].update(whole_tokens=39), r"document\.whole_tokens: is 39"),
    "kept above tokens": (lambda f: f.about["budget"].update(kept=41), r"budget\.kept: is 41"),
    "other dtype": (lambda f: f.about.update(dtype="float16"), r"layers\.0\.keys"),
    "unknown dtype": (lambda f: f.about.update(dtype="int4"), r"metadata dtype: is the text 'int4'"),
    "unknown key": (lambda f: f.about.update(more=1), r"metadata more: is not a key of this version"),
    "unknown inner key": (lambda f: f.about["budget"].update(more=1), r"metadata budget\.more"),
    "missing key": (lambda f: f.about.pop("rope"), r"metadata rope: is missing"),
    "keys out of order": (lambda f: f.about.update(rope=f.about.pop("rope")), r"one spelling"),
    "free keys out of order": (lambda f: f.about.update(method={"pool": 7, "name": "x"}), r"one spelling"),
    "version is text": (lambda f: f.about.update(format_version="1"), r"format_version"),
    "version 0": (lambda f: f.about.update(format_version=0, oldest_reader=0), r"format_version"),
    "oldest above version": (lambda f: f.about.update(oldest_reader=2), r"format_version"),
    "huge number": (lambda f: f.about["method"].update(pool=2**64), r"method\.pool"),
    "deep nesting": (lambda f: f.about.update(method=json.loads('{"a":' * 40 + "1" + "}" * 40)), r"nested deeper"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_header_with_right_hashes(kv, forgery, case):
    edit, match = FORGED[case]
    edit(forgery)
    forgery.write(kv)
    refuse(kv, CorruptFile, match, read_header)


# edits of the JSON texts themselves: (inner, outer), what the message says
RESPELLED = {
    "blank": (lambda t: t.replace('"dtype":', '"dtype": '), str, r"one spelling"),
    "outer blank": (str, lambda t: t.replace('"tokens":', '"tokens": '), r"one spelling"),
    "leading blank": (str, lambda t: " " + t, r"first bytes are damaged"),
    "repeated key": (lambda t: t.replace('"dtype":', '"dtype":"x","dtype":'), str, r"one spelling"),
    "repeated tensor": (
        str,
        lambda t: t[:-1] + ',"tokens":' + '{"dtype":"I32","shape":[40],"data_offsets":[0,160]}}',
        r"one spelling",
    ),
    "repeated metadata": (
        str,
        lambda t: t[:-1] + ',"__metadata__":' + t[16 : t.index('},"tokens"') + 1] + "}",
        r"one spelling",
    ),
    "other metadata": (str, lambda t: t.replace('"format":"pt"', '"format":"np"'), r"one spelling"),
    "unicode digits": (lambda t: t.replace("\\u00fc", "\\u00FC"), str, r"one spelling"),
    "number spelled longer": (lambda t: t.replace("10000.0", "10000.00"), str, r"one spelling"),
    "exponent": (lambda t: t.replace("10000.0", "1e4"), str, r"one spelling"),
    "NaN": (lambda t: t.replace("10000.0", "NaN"), str, r"out of range"),
    "Infinity": (lambda t: t.replace("10000.0", "-Infinity"), str, r"out of range"),
    "overflow": (lambda t: t.replace("10000.0", "1e999"), str, r"out of range"),
    "outer overflow": (str, lambda t: t.replace("[0,160]", "[0,1e999]"), r"out of range"),
    "endless digits": (lambda t: t.replace("10000.0", "9" * 5000), str, r"out of range"),
    "not JSON": (lambda t: t.replace("10000.0", "+1"), str, r"metadata character \d+: is not JSON"),
    "outer not JSON": (str, lambda t: t.replace("[0,160]", "[0,160"), r"header character \d+: is not JSON"),
    "outer deep nesting": (str, lambda t: t.replace("[0,160]", "[" * 5000 + "]" * 5000), r"nested too deeply"),
    "half a surrogate": (lambda t: t.replace("\\u00fc", "\\ud800"), str, r"document\.name: holds half"),
}


@pytest.mark.parametrize("case", RESPELLED)
def test_any_other_spelling_is_refused(kv, forgery, case):
    inner, outer, match = RESPELLED[case]
    good = forgery.bytes()
    forgery.write(kv, inner=inner, outer=outer)
    assert kv.read_bytes() != good
    refuse(kv, CorruptFile, match, read_header)


def test_padding_belongs_to_the_spelling(kv, forgery):
    raw = forgery.bytes()
    size = int.from_bytes(raw[:8], "little")
    longer = (size + 8).to_bytes(8, "little") + raw[8 : 8 + size] + b" " * 8 + raw[8 + size :]
    kv.write_bytes(longer)
    refuse(kv, CorruptFile, "one spelling", read_header)
    kv.write_bytes(longer.replace(b"}        ", b"}   \t    "))
    refuse(kv, CorruptFile, read=read_header)


def test_header_length_is_bounded_before_anything_is_read(kv):
    raw = kv.read_bytes()
    for length in (2**63, 2**64 - 1, len(raw) - 7):
        kv.write_bytes(length.to_bytes(8, "little") + raw[8:])
        refuse(kv, CorruptFile, r"file bytes 0-7: the header takes", read_header)
    with kv.open("wb") as file:  # a sparse file that has room for an endless header
        file.write((2**33).to_bytes(8, "little") + raw[8:])
        file.truncate(2**34)
    refuse(kv, CorruptFile, r"longer than a file of", read_header)


def test_a_newer_version_is_named(kv, forgery):
    forgery.about.update(format_version=4, oldest_reader=3)
    forgery.write(kv)
    refuse(kv, UnsupportedVersion, r"version 4 and needs a reader of version 3 or newer.*pip install -U dropkv")


def test_a_newer_file_for_old_readers_is_read(kv, forgery, sample):
    forgery.about.update(format_version=3, more={"b": [1], "a": 2})
    forgery.write(kv)
    contents = read_file(kv)
    assert contents.header.format_version == 3
    assert contents.header.metadata == sample.metadata
    forgery.about["budget"]["more"] = 1
    forgery.write(kv)
    refuse(kv, CorruptFile, r"budget\.more")


def test_codecs_of_later_versions_are_named(kv, forgery):
    first_row(forgery)["codec"] = "brotli"
    forgery.write(kv)
    refuse(kv, UnsupportedVersion, r"layers\.0\.keys: .*'brotli'.*newer reader", read_header)
    first_row(forgery)["codec"] = "raw"
    forgery.about["quantization"] = {"bits": 4}
    forgery.write(kv)
    refuse(kv, CorruptFile, r"metadata quantization\.kind: is missing", read_header)


def test_messages_stay_on_one_line(tmp_path, kv, forgery):
    path = tmp_path / "new\nline\x1b[2J.kv"
    forgery.about["dtype"] = "a\nb\x1b"
    forgery.write(path)
    with pytest.raises(CorruptFile) as caught:
        read_header(path)
    assert str(caught.value).isprintable()
