"""Networks spread over devices by accelerate: here a CPU with weights that wait on the disk; two GPUs are in benchmarks/two_gpus.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model

from dropkv.attention import output_projection
from dropkv.cache import Tail
from dropkv.compression import Compression, compress_document
from dropkv.devices import ROOM, device_map, execution_device, named_weights, refuse_spread
from dropkv.documents import Document
from dropkv.errors import UsageError
from dropkv.identity import mismatches
from dropkv.library import open_file
from dropkv.models import Model, load_model, wrap_model
from dropkv.prompts import Seam
from dropkv.quiet import quiet
from dropkv.settings import CompressSettings
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, the ship is Evergreen. " * 4
GIB = 1 << 30


def spread(family: str, folder: Path, **changes: Any) -> Model:
    """The middle layer's and the head's weights wait on the disk."""
    network = tiny.network(family, **changes)
    network.set_attn_implementation("eager")
    place = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    place |= {f"model.layers.{index}": "disk" if index == 1 else "cpu" for index in range(3)}
    with quiet():
        dispatched = dispatch_model(network, place, main_device="cpu", offload_dir=folder)
    return wrap_model(dispatched, tiny.tokenizer(), id=f"tiny-{family}")


def compressed(model: Model, **settings: Any) -> Compression:
    return compress_document(model, Document.of(TEXT), CompressSettings(budget=0.5, chunk=64, **settings))


@pytest.mark.parametrize("method", ["adadropkv", "kvzip", "criticalkv"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "stablelm"])
def test_weights_that_wait_elsewhere(family: str, method: str, tmp_path: Path) -> None:
    """Equal to the last bit, from the document to a saved file's answer; the fingerprint is that of the same weights."""
    changes = {} if family == "stablelm" else {"tie_word_embeddings": False}
    plain, model = tiny.model(family, **changes), spread(family, tmp_path / "disk", **changes)
    assert model.network.model.layers[1].self_attn.o_proj.weight.is_meta
    assert model.device == torch.device("cpu") and model.devices == (torch.device("cpu"),) * 3
    assert model.dtype == torch.float32
    mine, theirs = compressed(model, method=method), compressed(plain, method=method)
    for one, other in zip(mine.session().prefix.layers, theirs.session().prefix.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.positions, other.positions)
    assert mine.metadata.model.weights == theirs.metadata.model.weights
    assert mismatches(mine.metadata, plain, Seam.of(plain.tokenizer, name="plain")) == []
    path = tmp_path / "text.kv"
    mine.save(path)
    question = mine.session().seam.question_ids("What is the code?")
    want = theirs.session().forward(question, Tail())
    for asked in (model, plain):
        assert torch.equal(open_file(path).with_model(asked).session.forward(question, Tail()), want)


def test_a_whole_network_in_host_memory_with_tied_embeddings() -> None:
    plain, network = tiny.model("qwen2", tie_word_embeddings=True), tiny.network("qwen2", tie_word_embeddings=True)
    model = wrap_model(cpu_offload(network, "cpu"), tiny.tokenizer(), id="tiny-qwen2")
    assert all(parameter.is_meta for parameter in model.network.parameters())
    mine, theirs = compressed(model), compressed(plain)
    assert mine.metadata.model.weights["samples"] == theirs.metadata.model.weights["samples"]
    assert mine.metadata.model.weights["parameters"] == theirs.metadata.model.weights["parameters"]
    question = mine.session().seam.question_ids("What is the code?")
    assert torch.equal(mine.session().forward(question, Tail()), theirs.session().forward(question, Tail()))
    want = plain.network.model.layers[1].self_attn.o_proj.weight
    assert torch.equal(output_projection(model.network, 1, 64), want)


def test_named_weights_fetches_what_waits(tmp_path: Path) -> None:
    plain, model = tiny.network(), spread("llama", tmp_path)
    pairs = zip(named_weights(plain), named_weights(model.network), strict=True)
    assert all(torch.equal(one[1], other[1]) for one, other in pairs)


def test_execution_device_follows_the_hook() -> None:
    layer = torch.nn.Linear(2, 2)
    assert execution_device(layer) == torch.device("cpu") == execution_device(torch.nn.ReLU())
    layer._hf_hook = SimpleNamespace(execution_device=1)
    assert execution_device(layer) == torch.device("cuda", 1)
    layer._hf_hook = SimpleNamespace(hooks=[SimpleNamespace(), SimpleNamespace(execution_device="cuda:0")])
    assert execution_device(layer) == torch.device("cuda", 0)


def test_entries_of_a_layer_go_where_it_computes(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer to the model's devices; without a map all are the model's one."""
    prefix = compressed(tiny_llama).session().prefix
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *place: asked.append(place[0]) or tensor)
    prefix.to([torch.device("cuda", index) for index in (0, 0, 1)], torch.float64)
    prefix.to(torch.device("cuda", 2), torch.float64)
    monkeypatch.undo()
    assert [place.index for place in asked] == [0] * 8 + [1] * 4 + [2] * 12
    with pytest.raises(ValueError, match="shorter"):
        prefix.to([tiny_llama.device], torch.float64)
    assert tiny_llama.devices == (tiny_llama.device,) * 3


def test_what_from_pretrained_is_told() -> None:
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    free = {one: 10 * GIB, two: 20 * GIB}.__getitem__
    whole = {"device_map": {"": one}}
    assert device_map(5 * GIB, [one, two], free, named=False) == whole
    assert device_map(99 * GIB, [one], free, named=True) == whole
    room = {0: int(10 * GIB * ROOM), 1: int(20 * GIB * ROOM), "cpu": 1 << 50}
    assert device_map(9 * GIB, [one, two], free, named=False) == {"device_map": "balanced", "max_memory": room}
    assert device_map(5 * GIB, [one, two], free, named=True) == {"device_map": "balanced", "max_memory": room}
    assert device_map(40 * GIB, [one, two], free, named=False) == {"device_map": "auto", "max_memory": room}
    alone = device_map(9 * GIB, [one], free, named=False)
    assert alone == {"device_map": "auto", "max_memory": {0: room[0], "cpu": 1 << 50}}


def test_the_bench_needs_one_device(tiny_llama: Model) -> None:
    refuse_spread(tiny_llama)
    places = tuple(torch.device("cuda", index) for index in (0, 0, 1))
    with pytest.raises(UsageError, match=r"tiny-llama is spread over cuda:0, cuda:1, .*: use --device cuda:0"):
        refuse_spread(replace(tiny_llama, layer_devices=places))


def test_several_devices_are_gpus() -> None:
    for name in ("cpu,cuda:0", "cuda:0,", "auto,cpu"):
        with pytest.raises(UsageError, match="use auto, cpu, cuda, cuda:N or several as cuda:0,cuda:1"):
            load_model("smollm2-135m", device=name)
    with pytest.raises(UsageError, match="CUDA devices here"):
        load_model("smollm2-135m", device="cuda:0,cuda:99")
