"""Metadata is strict: one wrong value is named by its key, in reading and in writing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from formats import CorruptFile, Metadata, WriteFailed, read_header

WRONG = [
    ("writer", None, "writer: is null, not text"),
    ("model.id", 3, r"model\.id: is 3, not text"),
    ("model.source", "disk", r"model\.source: is the text 'disk', not one of bundled, hub, folder"),
    ("model.revision", False, r"model\.revision: is false"),
    ("model.config", [], r"model\.config: is a list, not an object"),
    ("model.config.a", float("nan"), r"model\.config\.a: is not a JSON value"),
    ("model.config.a", {1: 2}, r"model\.config\.a: has the key 1"),
    ("model.config.a", "\ud800", r"model\.config\.a: holds half a surrogate pair"),
    ("model.config.a", (1, 2), r"model\.config\.a: is not a JSON value"),
    ("model.weights", None, r"model\.weights: is null"),
    ("tokenizer.system", 0, r"tokenizer\.system: is 0"),
    ("tokenizer.template_arguments", "x", r"tokenizer\.template_arguments"),
    ("document.name", "x" * (2**20 + 1), r"document\.name"),
    ("document.sha256", "AB" * 32, r"document\.sha256: .*64 lower-case hexadecimal digits"),
    ("document.sha256", "ab" * 31, r"document\.sha256"),
    ("document.tokens", 0, r"document\.tokens: is 0, not a whole number from 1"),
    ("document.tokens", 40.0, r"document\.tokens: is 40\.0"),
    ("document.tokens", True, r"document\.tokens: is true"),
    ("document.head_tokens", 41, r"document\.head_tokens: is 41, not a whole number from 0 to 40"),
    ("budget", None, "budget: is null, not an object"),
    ("budget.asked", 0, r"budget\.asked: is 0"),
    ("budget.asked", 1.5, r"budget\.asked: is 1\.5, not a fraction"),
    ("budget.asked", float("nan"), r"budget\.asked: is nan"),
    ("budget.asked", True, r"budget\.asked: is true"),
    ("budget.kept", 0, r"budget\.kept"),
    ("budget.kept", 41, r"budget\.kept: is 41, more than the document's 40 tokens"),
    ("budget.alpha", 1.01, r"budget\.alpha"),
    ("budget.forced_last", -1, r"budget\.forced_last"),
    ("budget.nested", 1, r"budget\.nested: is 1, not true or false"),
    ("layers", {}, "layers: is not a list of 1 to 1024 layers"),
    ("layers.0.kind", "linear", r"layers\[0\]\.kind"),
    ("layers.0.query_heads", 7, r"layers\[0\]\.query_heads: is 7, no multiple of 3"),
    ("layers.0.window", 8, r"layers\[0\]\.window: is 8 in a full layer"),
    ("layers.2.window", None, r"layers\[2\]\.window: is null in a sliding layer"),
    ("layers.1.d_k", 0, r"layers\[1\]\.d_k"),
    ("layers.1.entries", 121, r"layers\[1\]\.entries: is 121, more than 3 heads of 40 tokens have"),
    ("dtype", "int8", "dtype: is the text 'int8'"),
    ("rope", [1], "rope: is a list"),
    ("fidelity", 0.5, r"fidelity: is 0\.5"),
]


@pytest.mark.parametrize(("key", "value", "match"), WRONG, ids=[f"{key}={str(value)[:12]}" for key, value, _ in WRONG])
def test_wrong_value_is_named(sample, key, value, match):
    data = copy.deepcopy(sample.metadata.to_json())
    *parents, last = key.split(".")
    place = data
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    with pytest.raises(CorruptFile, match=f"^{match}"):
        Metadata.from_json(data)


def test_json_round_trip_keeps_values_and_their_types(sample):
    metadata = replace(
        sample.metadata, budget=replace(sample.metadata.budget, asked=7, alpha=None), fidelity={"kl": 0.5}
    )
    again = Metadata.from_json(metadata.to_json())
    assert again == metadata
    assert type(again.budget.asked) is int
    whole = replace(metadata, budget=replace(metadata.budget, asked=1.0))
    assert type(Metadata.from_json(whole.to_json()).budget.asked) is float


def test_keys_of_free_dictionaries_are_sorted(sample):
    assert list(sample.metadata.to_json()["model"]["config"]) == ["a", "b"]
    assert list(sample.metadata.to_json()["model"]["config"]["a"]) == ["y", "z"]


def test_undecodable_file_name_becomes_text(tmp_path, sample, with_metadata):
    document = replace(sample.metadata.document, name="caf\udce9.txt")
    with_metadata(sample, document=document, observer={"files": ["caf\udce9.txt"]}).write(tmp_path / "book.kv")
    metadata = read_header(tmp_path / "book.kv").metadata
    assert metadata.document.name == "caf?.txt"
    assert metadata.observer == {"files": ["caf?.txt"]}


def test_writer_refuses_what_no_reader_would_accept(tmp_path, sample, with_metadata):
    path = tmp_path / "book.kv"
    for fields, match in (
        ({"dtype": "float16"}, r"layers\.0\.keys: cannot be stored: is torch\.bfloat16 \[14, 6\]"),
        ({"layers": sample.metadata.layers[:2]}, "3 layers, the metadata has 2"),
        ({"dtype": "int8"}, "dtype: cannot be stored"),
        ({"layers": ()}, "3 layers, the metadata has 0"),
        ({"method": {"f": float("inf")}}, r"method\.f: cannot be stored"),
        ({"method": {"s": "x" * (5 << 20)}}, "the header takes"),
        (
            {"budget": replace(sample.metadata.budget, kept=11)},
            r"layers\.1\.admit, head 1, entry 6: cannot be stored: is 12",
        ),
    ):
        with pytest.raises(WriteFailed, match=match):
            with_metadata(sample, **fields).write(path)
    sample.layers[1].scores[3] = float("nan")
    with pytest.raises(WriteFailed, match=r"layers\.1\.scores, head 0, entry 3: cannot be stored: is nan"):
        sample.write(path)
    assert list(tmp_path.iterdir()) == []
