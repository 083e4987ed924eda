"""Checkpoints with quantised weights: served as any other, and one line where their package or a GPU is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dropkv import loading
from dropkv.attention import output_projection
from dropkv.cache import Tail
from dropkv.compression import compress_document
from dropkv.documents import Document
from dropkv.errors import IdentityError, ModelError
from dropkv.library import open_file
from dropkv.models import Model, load_model, wrap_model
from dropkv.quiet import quiet
from dropkv.settings import CompressSettings
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, the ship is Evergreen. " * 4


class Packed(nn.Module):
    """A linear layer in the manner of GPTQ: four 8-bit numbers in one integer, a scale per output, no parameter called weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        whole = (linear.weight / scale).round().to(torch.int8)
        self.register_buffer("qweight", whole.view(torch.int32).clone())
        self.register_buffer("scales", scale.clone())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.clone())

    def matrix(self) -> Tensor:
        return self.qweight.view(torch.int8).float() * self.scales

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.matrix(), self.bias)


def packed(seed: int = 0, family: str = "qwen2") -> Model:
    network = tiny.network(family, seed=seed)
    for layer in network.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Packed(child))
    return wrap_model(network, tiny.tokenizer(), id="packed")


@pytest.mark.parametrize("method", ["adadropkv", "criticalkv"])
def test_packed_weights_from_document_to_answer(method: str, tmp_path: Path) -> None:
    """Equal to the same network with its weights unpacked, for a method that measures behind the output projection too."""
    model = packed()
    plain = tiny.network("qwen2")
    for layer, twin in zip(model.network.model.layers, plain.model.layers, strict=True):
        for module, other in ((layer.self_attn, twin.self_attn), (layer.mlp, twin.mlp)):
            for name, child in module.named_children():
                if isinstance(child, Packed):
                    getattr(other, name).weight.data = child.matrix()
    settings = CompressSettings(budget=0.5, chunk=64, method=method)
    mine = compress_document(model, Document.of(TEXT), settings)
    theirs = compress_document(wrap_model(plain, tiny.tokenizer(), id="plain"), Document.of(TEXT), settings)
    for one, other in zip(mine.session().prefix.layers, theirs.session().prefix.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.allclose(one.keys, other.keys, atol=1e-5) and torch.allclose(one.scores, other.scores, rtol=1e-3)
    path = tmp_path / "text.kv"
    mine.save(path)
    question = mine.session().seam.question_ids("What is the code?")
    session = open_file(path).with_model(model).session
    assert torch.equal(session.forward(question, Tail()), mine.session().forward(question, Tail()))


def test_other_packed_weights_are_other_weights(tmp_path: Path) -> None:
    """The packed integers count: nothing else differs between these two."""
    model, other = packed(), packed()
    path = tmp_path / "text.kv"
    compress_document(model, Document.of(TEXT), CompressSettings(budget=0.5, observe="tail")).save(path)
    open_file(path).with_model(other)
    for module in other.network.modules():
        if isinstance(module, Packed):
            module.qweight.add_(1 << 12)
    with pytest.raises(IdentityError, match="made with other weights"):
        open_file(path).with_model(other)


def test_the_output_projection_of_what_is_packed() -> None:
    model = packed(family="llama")
    linear = model.network.model.layers[1].self_attn.o_proj
    assert torch.allclose(output_projection(model.network, 1, 64), linear.matrix(), atol=1e-6)
    linear.bias = torch.ones(64)
    assert torch.allclose(output_projection(model.network, 1, 64), linear.matrix(), atol=1e-6)
    with pytest.raises(ModelError, match="no output projection"):
        output_projection(model.network, 1, 48)
    narrow = nn.Linear(64, 64)
    narrow.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.float8_e4m3fn), requires_grad=False)
    narrow.forward = lambda x: 3 * x  # type: ignore[method-assign]
    model.network.model.layers[1].self_attn.o_proj = narrow
    assert torch.equal(output_projection(model.network, 1, 64), 3 * torch.eye(64))


# --- loading


def quantized(folder: Path, **settings: Any) -> Path:
    with quiet():
        tiny.network().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantised \(gptq\), .* run: pip install gptqmodel optimum"),
        ({"quant_method": "awq", "bits": 4}, r"quantised \(awq\), .* run: pip install gptqmodel"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"quantised \(bitsandbytes\), .* run: pip install bitsandbytes",
        ),
        (
            {"quant_method": "compressed-tensors"},
            r"quantised \(compressed-tensors\), .* run: pip install compressed-tensors",
        ),
    ],
)
def test_packages_that_are_missing(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weight is read."""
    folder = quantized(tmp_path / "m", **settings)
    (folder / "model.safetensors").write_bytes(b"never read")
    present = importlib.util.find_spec
    needed = {module for modules in loading.PACKAGES.values() for module in modules}
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None if name in needed else present(name))
    with pytest.raises(ModelError, match=f"^[^\n]*: its weights are {said}$") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_what_else_stops_a_quantised_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gpu(*_: Any) -> None:
        raise RuntimeError("No GPU found.\nMore about that.")

    monkeypatch.setattr(loading, "_network", without_gpu)
    folder = quantized(tmp_path / "m", quant_method="fp8", weight_block_size=[16, 16])
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    said = "m: its quantised weights (fp8) cannot be loaded here (No GPU found.); many kinds need a GPU, "
    assert str(caught.value) == said + "use a copy that is not quantised"


def test_names_of_methods() -> None:
    assert loading.quantization(SimpleNamespace()) is None
    assert loading.quantization(SimpleNamespace(quantization_config={"quant_method": "awq"})) == "awq"
    kind = SimpleNamespace(quant_method=SimpleNamespace(value="gptq"))
    assert loading.quantization(SimpleNamespace(quantization_config=kind)) == "gptq"
    assert loading.quantization(SimpleNamespace(quantization_config={"bits": 4})) == "unknown"
    loading.require_packages(SimpleNamespace(quantization_config={"quant_method": "fp8"}), "m")
