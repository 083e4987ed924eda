"""Estimates without weights: the same figures as with them, whatever the model's form, and no download of gigabytes."""

from __future__ import annotations

import dataclasses

import pytest

import dropkv
from dropkv import compression, downloads
from dropkv.errors import DocumentError, ModelError, UsageError
from dropkv.models import load_model, load_outline
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny.network("mistral", sliding_window=64).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_an_estimate_is_the_same_without_weights(folder, dtype):
    document, settings = dropkv.Document.of(TEXT, "note"), dropkv.CompressSettings(budget=0.4, chunk=40)
    outline, model = (load(str(folder), dtype=dtype, device="cpu") for load in (load_outline, load_model))
    assert all(parameter.is_meta for parameter in outline.network.parameters())
    assert (outline.dtype, outline.device, outline.geometry) == (model.dtype, model.device, model.geometry)
    assert (outline.max_positions, outline.rope, outline.id) == (model.max_positions, model.rope, model.id)
    ours, theirs = (compression.estimate(one, document, settings) for one in (outline, model))
    assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.2)  # the process itself is part of it
    assert dataclasses.replace(ours, peak_bytes=0) == dataclasses.replace(theirs, peak_bytes=0)
    with pytest.raises(DocumentError, match="512 positions"):
        compression.estimate(outline, dropkv.Document.of(TEXT * 9, "note"), settings)


def test_what_cannot_be_loaded_has_no_outline(folder, tmp_path):
    with pytest.raises(UsageError, match="unknown dtype 'int3'"):
        load_outline(str(folder), dtype="int3")
    with pytest.raises(ModelError, match="neither a config"):
        load_outline(str(tmp_path))


def test_of_a_hub_model_only_the_small_files_are_fetched(folder, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(repository, *, revision, allow_patterns, ignore_patterns):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(downloads, "cached_snapshot", lambda *_: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(folder / "config.json"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(downloads, "weight_files", lambda _: ())
    assert load_outline("someone/something").source == "hub"
    assert asked == [downloads.SMALL_FILES] and not any("safetensors" in pattern for pattern in asked[0])
    with pytest.raises(ModelError, match="no complete set of"):
        load_model("someone/something")
    assert asked[1] == downloads.WANTED_FILES
