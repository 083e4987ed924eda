"""Finding, refusing and loading models: every failure is one line that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from dropkv import gguf_cache, loading
from dropkv.checkpoints import find_checkpoint
from dropkv.compression import compress_document
from dropkv.documents import Document
from dropkv.downloads import weight_files
from dropkv.errors import ModelError, UsageError
from dropkv.models import (
    LayerGeometry,
    Model,
    catalogue,
    geometry_of,
    load_model,
    load_outline,
    refuse_unsupported,
    unrotated_layers,
    wrap_model,
)
from dropkv.probe import probe
from dropkv.quiet import quiet
from dropkv.settings import CompressSettings, Sampling
from dropkv_cli.output import say
from tests import tiny


def saved(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A tiny model in a folder, as transformers saves it."""
    with quiet():
        tiny.network(family, **changes).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


# --- the bundled model and the catalogue


def test_smollm2(smollm2: Model) -> None:
    assert (smollm2.id, smollm2.source, smollm2.revision) == ("smollm2-135m", "bundled", None)
    assert smollm2.geometry == (LayerGeometry("full", 9, 3, 64, 64, None),) * 30
    assert smollm2.max_positions == 8192 and smollm2.rope == {"rope_theta": 100000.0, "rope_type": "default"}
    assert 2 in smollm2.stop_ids and smollm2.dtype == torch.float32 and smollm2.device.type == "cpu"
    assert not smollm2.network.training and not any(p.requires_grad for p in smollm2.network.parameters())
    assert [file.suffix for file in smollm2.weights] == [".gguf"]


def test_catalogue_and_help_do_not_import_torch() -> None:
    code = (
        "import sys; from dropkv.models import catalogue; rows = catalogue();"
        "print([(r.alias, r.usable_offline) for r in rows][0], any(m in sys.modules for m in ('torch', "
        "'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "('smollm2-135m', True) False"
    aliases = ["smollm2-135m", "llama-3.1-8b", "mistral-7b-512k", "qwen2.5-7b-1m"]
    assert [row.alias for row in catalogue()] == aliases
    assert catalogue()[1].stands_for == "meta-llama/Llama-3.1-8B-Instruct" and "licence" in catalogue()[1].note


def test_loading_is_silent_and_leaves_settings_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled())
    load_model(str(saved(tmp_path)))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()) == before
    assert capfd.readouterr() == ("", "")


# --- names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2-135", "did you mean smollm2-135m"),
        ("llama3.1-8b", "did you mean llama-3.1-8b"),
        ("zzz", "no such alias or folder; `dropkv models`"),
        ("./none/here", "no such alias or folder"),
        ("/none/here/at/all", "no such alias or folder"),
        ("a\x1b[2J", "no such alias or folder"),
    ],
)
def test_unknown_names(name: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    line = str(caught.value)
    assert said in line and "\n" not in line and "\x1b" not in line


def test_unknown_dtypes_and_devices_come_before_anything_heavy() -> None:
    with pytest.raises(UsageError, match=r"use one of auto, bfloat16 \(bf16\), float16 \(fp16\), float32 \(fp32\)"):
        load_model("none/none", dtype="int8")
    with pytest.raises(UsageError, match="use auto, cpu, cuda"):
        load_model("none/none", device="gpu")
    with pytest.raises(UsageError, match="CUDA devices here"):
        load_model("none/none", device="cuda:99")
    with pytest.raises(UsageError, match="only models of the Hub have revisions"):
        load_model("smollm2-135m", revision="main")


# --- folders


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_folders(tmp_path: Path, family: str) -> None:
    model = load_model(str(saved(tmp_path / "my-model", family)), dtype="bf16")
    assert (model.id, model.source, model.dtype) == ("my-model", "folder", torch.bfloat16)
    assert model.geometry == (LayerGeometry("full", 4, 2, 16, 16, None),) * 3
    assert model.max_positions == 512 and model.stop_ids == {2}
    assert [file.name for file in model.weights] == ["model.safetensors"]
    assert model.network.config._attn_implementation == "dropkv"


def test_the_current_folder_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved(tmp_path / "here"))
    assert find_checkpoint(".").id == "here"


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    def line(path: Path) -> str:
        with pytest.raises(ModelError) as caught:
            load_model(str(path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "neither a config.json nor a .gguf file" in line(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "cannot be loaded" in line(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert "holds 2 GGUF files (a.gguf, b.gguf); give the one you mean" in line(tmp_path)
    assert find_checkpoint(str(tmp_path / "b.gguf")).gguf == "b.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert "no *.safetensors" in line(tmp_path)
    (tmp_path / "note.txt").write_text("x")
    assert "is a file; give the folder" in line(tmp_path / "note.txt")


def test_damaged_folders(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="m: cannot be loaded"):
        load_model(str(folder))
    weights.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"lack \d+ weights .*model\.layers\.3"):
        load_model(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    said = r"m: model\.layers\.0\.mlp\.\w+\.weight has the shape .* in its files, its config asks for .*; download"
    with pytest.raises(ModelError, match=said) as caught:
        load_model(str(folder))
    assert "[64, 96]" in str(caught.value) and "[64, 80]" in str(caught.value)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    with pytest.raises(ModelError, match="m: cannot be loaded"):
        load_model(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"^m: has no tokenizer; put tokenizer\.json beside its config\.json$"):
        load_model(str(folder))


def test_the_tokenizer_of_another_model_is_told_before_a_token_is_read(tmp_path: Path) -> None:
    network = tiny.network("llama", vocab_size=64)
    said = rf"its tokenizer has {tiny.tokenizer().vocab_size} tokens, the model has 64; put the tokenizer that belongs"
    with pytest.raises(ModelError, match="^m: " + said):
        wrap_model(network, tiny.tokenizer(), id="m")
    with quiet():
        network.save_pretrained(tmp_path / "m")
    tiny.tokenizer().save_pretrained(tmp_path / "m")
    for load in (load_model, load_outline):
        with pytest.raises(ModelError, match=said):
            load(str(tmp_path / "m"))


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_the_text_part_of_models_that_read_images(family: str, tmp_path: Path) -> None:
    """Larger Gemma-3 and Mistral-3 checkpoints: loaded without their vision tower, equal to the whole on text."""
    text = tiny.network("gemma3" if family == "gemma3" else "ministral", tie_word_embeddings=True).config
    vision: dict[str, Any] = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    whole = CONFIG_MAPPING[family](
        text_config=text.to_dict(),
        vision_config=CONFIG_MAPPING["siglip_vision_model" if family == "gemma3" else "pixtral"](
            **vision, image_size=28, patch_size=14
        ).to_dict(),
        **({"mm_tokens_per_image": 4} if family == "gemma3" else {}),
    )
    network = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(whole)](whole).eval()
    with quiet():
        network.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert model.network.config.model_type == text.model_type
    assert [layer.kind for layer in model.geometry] == ["sliding", "full", "sliding"]
    ids = torch.tensor([[5, 6, 7, 8]])
    model.network.set_attn_implementation("eager")
    with torch.no_grad():
        apart = (model.network(input_ids=ids).logits - network(input_ids=ids).logits).abs().max()
    assert float(apart) < 1e-4
    with pytest.raises(ModelError, match="it reads images or sound"):
        wrap_model(network, tiny.tokenizer(), id="whole")


def test_a_tokenizer_without_a_pad_token(tmp_path: Path) -> None:
    """Nothing is ever padded, so none is asked for; nor is an end-of-text token."""
    folder = saved(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in settings.items() if name not in ("pad_token", "eos_token", "bos_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    model = load_model(str(folder))
    assert model.tokenizer.pad_token is None and model.tokenizer.eos_token is None
    assert model.stop_ids == {2}
    document = Document.of("The code is 4711, the ship is Evergreen. " * 8)
    compressed = compress_document(model, document, CompressSettings(budget=0.5, chunk=64))
    sampling = Sampling(max_new_tokens=3)
    assert compressed.session().ask("What is the code?", sampling).generated_tokens == 3


def test_an_index_that_names_missing_shards(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    assert [file.name for file in weight_files(folder)] == ["model.safetensors"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))
    assert weight_files(folder) == ()
    with pytest.raises(ModelError, match="names files that are missing"):
        find_checkpoint(str(folder))


# --- what cannot be served


def config(**fields: Any) -> Any:
    base = {"model_type": "made-up", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return SimpleNamespace(**{**base, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 models cannot be served: it is an encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear attention layers"),
        ({"layer_types": ["chunked_attention"]}, "chunked attention layers"),
        ({"layers_block_type": ["mamba"]}, "mixed layers"),
        ({"model_type": "mamba"}, "state-space layers"),
        ({"model_type": "gpt_oss"}, "sinks"),
        ({"rope_parameters": None}, "no rotary position embeddings"),
        ({"alibi": True}, "no rotary position embeddings"),
        ({"position_embedding_type": "nope"}, "no rotary position embeddings"),
        ({"model_type": "llama4_text"}, "works in chunks"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"vision_config": {}}, "images"),
        ({"use_bidirectional_attention": True}, "looks ahead"),
        ({"num_kv_shared_layers": 2}, "share keys"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "unknown type spiral"),
        ({"rope_parameters": {"full_attention": {"rope_type": "spiral"}, "x": {"rope_type": "default"}}}, "spiral"),
    ],
)
def test_refused_by_name_with_the_reason(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        refuse_unsupported(config(**fields))
    assert "use a decoder-only model" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "own", "said"),
    [
        ("gpt_oss", {"num_local_experts": 2}, "sinks"),
        ("granite_swa", {}, "GraniteSWAAttention changes its attention by s_aux"),
        ("doge", {}, "DogeAttention changes its attention by an attention mask"),
        ("deepseek_v3", {"n_routed_experts": 2, "n_group": 1, "topk_group": 1}, "latent keys and values"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "it has conv layers"),
        ("qwen3_next", {"num_experts": 2}, "linear attention layers"),
        ("gpt_neox_japanese", {}, "layer 0 has no softmax attention that dropkv can see"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "no rotary position embeddings"),
    ],
)
def test_families_that_are_refused(kind: str, own: dict[str, Any], said: str) -> None:
    """Real networks, not made-up configs: one line with the reason."""
    shape: dict[str, Any] = dict(vocab_size=tiny.VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    with quiet():
        config = CONFIG_MAPPING[kind](**shape, num_attention_heads=4, num_key_value_heads=4, **own)
        network = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
        with pytest.raises(ModelError, match=said) as caught:
            wrap_model(network, tiny.tokenizer(), id="m")
    assert "\n" not in str(caught.value) and "use a" in str(caught.value)


@pytest.mark.parametrize("regime", ["default", "linear", "yarn", "llama3", "longrope", "dynamic"])
def test_served_regimes(regime: str) -> None:
    refuse_unsupported(config(rope_parameters={"rope_type": regime, "factor": 2.0}))


def test_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_bidirectional_attention": True}))
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelError, match="llama models cannot be served: its attention looks ahead"):
        load_model(str(folder))


# --- shape


def test_geometry_of_sliding_layers() -> None:
    full, sliding = LayerGeometry("full", 4, 2, 16, 16, None), LayerGeometry("sliding", 4, 2, 16, 16, 32)
    assert geometry_of(tiny.network("mistral", sliding_window=32).config) == (sliding,) * 3
    assert geometry_of(tiny.network("mistral", sliding_window=512).config) == (full,) * 3
    mixed = tiny.network("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert geometry_of(mixed.config) == (full, sliding, sliding)
    assert geometry_of(tiny.network("qwen2", sliding_window=32).config) == (full,) * 3
    assert wrap_model(mixed, tiny.tokenizer(), id="mixed").geometry == (full, sliding, sliding)
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, num_hidden_layers=1, max_position_embeddings=9)
    assert geometry_of(plain) == (LayerGeometry("full", 4, 4, 16, 16, None),)


def test_the_test_run_finds_layers_without_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    layer = model.network.model.layers[1].self_attn
    monkeypatch.setattr(type(layer), "__getattr__", torch.nn.Module.__getattr__, raising=False)
    forward = layer.forward

    def unrotated(hidden: Any, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return forward(hidden, (torch.ones_like(cos), torch.zeros_like(sin)), *args, **kwargs)

    monkeypatch.setattr(
        layer,
        "forward",
        lambda hidden_states, position_embeddings, *a, **k: unrotated(hidden_states, position_embeddings, *a, **k),
    )
    with pytest.raises(ModelError, match="tiny: layer 1 has no rotary position embeddings"):
        probe(model.network, model.geometry, "tiny")


def test_layers_that_are_known_to_have_no_rotation() -> None:
    """What the config says and what the layers do must agree."""
    smollm3, cohere2 = tiny.model("smollm3"), tiny.model("cohere2")
    assert unrotated_layers(smollm3.network.config) == {1} == unrotated_layers(cohere2.network.config)
    assert unrotated_layers(tiny.network("llama").config) == frozenset()
    everywhere = tiny.network("exaone4", sliding_window=None, layer_types=["full_attention"] * 3).config
    assert unrotated_layers(everywhere) == frozenset()
    with pytest.raises(ModelError, match="tiny: layer 1 has no rotary position embeddings"):
        probe(smollm3.network, smollm3.geometry, "tiny")
    with pytest.raises(ModelError, match="tiny: layer 0 rotates its keys, which its config does not say"):
        probe(smollm3.network, smollm3.geometry, "tiny", {0, 1})


def test_attention_in_pieces_is_refused() -> None:
    config = CONFIG_MAPPING["diffllama"](
        vocab_size=tiny.VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    network = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with pytest.raises(ModelError, match="d: layer 0 computes its attention in more than one piece"):
        wrap_model(network, tiny.tokenizer(), id="d")


def test_the_test_run_compares_shapes() -> None:
    model = tiny.model("llama")
    wrong = (LayerGeometry("full", 4, 4, 16, 16, None),) * 3
    with pytest.raises(ModelError, match=r"layer 0 has heads of the shape \(4, 2, 16, 16\)"):
        probe(model.network, wrong, "tiny")
    with pytest.raises(ModelError, match="layer 3 has no softmax attention"):
        probe(model.network, (*model.geometry, model.geometry[0]), "tiny")
    sliding = (LayerGeometry("sliding", 4, 2, 16, 16, 8),) * 3
    with pytest.raises(ModelError, match="has a window of None"):
        probe(model.network, sliding, "tiny")


def test_stop_ids_come_from_config_tokenizer_and_template() -> None:
    network, tokenizer = tiny.network(eos_token_id=[0, 5]), tiny.tokenizer()
    network.generation_config.eos_token_id = [0, 5]
    assert wrap_model(network, tokenizer, id="m").stop_ids == {0, 2, 5}
    tokenizer.eos_token = "<|im_start|>"
    assert wrap_model(network, tokenizer, id="m").stop_ids == {0, 1, 2, 5}
    tokenizer.chat_template = tiny.SHOUTING  # refused where it is needed, not here
    assert wrap_model(network, tokenizer, id="m").stop_ids == {0, 1, 5}


# --- copies of converted GGUFs


def test_copies_are_exact_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPKV_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF and so on")
    folder = gguf_cache.copy_folder(gguf)
    assert folder is not None and not gguf_cache.is_valid(folder)
    network = tiny.network("llama", tie_word_embeddings=True)
    leftover = folder.parent / ".unfinished-1-x"
    leftover.mkdir(parents=True)
    os.utime(leftover, (0, 0))
    gguf_cache.store(folder, network, tiny.tokenizer())
    assert gguf_cache.is_valid(folder) and [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    model = load_model(str(folder))
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, model.network.get_parameter(name)), name
    assert model.stop_ids == {2} and model.tokenizer.get_vocab() == tiny.tokenizer().get_vocab()
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert not gguf_cache.is_valid(folder)
    gguf_cache.store(folder, network, tiny.tokenizer())
    assert gguf_cache.is_valid(folder)
    gguf.write_bytes(b"GGUF and something else")
    assert gguf_cache.copy_folder(gguf) != folder


def test_copies_are_never_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("DROPKV_CACHE", "")
    assert gguf_cache.copy_folder(gguf) is None
    monkeypatch.setenv("DROPKV_CACHE", str(gguf / "under-a-file"))
    folder = gguf_cache.copy_folder(gguf)
    assert folder is not None
    notes: list[str] = []
    gguf_cache.store(folder, tiny.network(), tiny.tokenizer(), notes.append)
    assert not gguf_cache.is_valid(folder)
    assert notes == [
        f"note: the converted model cannot be kept in {gguf}/under-a-file (not a directory), so every start converts it anew; "
        f"name another folder with DROPKV_CACHE, or set it empty to be without"
    ]
    monkeypatch.setenv("DROPKV_CACHE", "~nobody-of-this-name/x")
    assert gguf_cache.copy_folder(gguf, notes.append) is None
    assert "kept in ~nobody-of-this-name/x (there is no such home)" in notes[1]
    folder = tmp_path / "full" / "a" / "copy"
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        gguf_cache.store(folder, tiny.network(), tiny.tokenizer(), notes.append)
    assert f"kept in {tmp_path}/full (2 MiB have to be free)" in notes[2] and len(notes) == 3
    gguf_cache.store(folder, tiny.network(), tiny.tokenizer(), notes.append)
    assert gguf_cache.is_valid(folder) and len(notes) == 3
    monkeypatch.setattr(gguf_cache, "LIMIT_BYTES", 3)
    assert gguf_cache.copy_folder(gguf) is None
    monkeypatch.delenv("DROPKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert gguf_cache.cache_root() == Path("/x/dropkv")


def test_a_cache_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, which is silent while transformers loads."""
    network = tiny.network()
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("DROPKV_CACHE", str(gguf))
    monkeypatch.setattr(loading, "read_config", lambda *_: network.config)
    monkeypatch.setattr(loading, "_tokenizer", lambda *_: tiny.tokenizer())
    monkeypatch.setattr(loading, "_network", lambda *_: network)
    checkpoint = find_checkpoint(str(gguf))
    loading.load_checkpoint(checkpoint, "float32", [torch.device("cpu")], lambda config: None, note=say)
    told = capsys.readouterr().err
    assert (
        told.startswith(f"note: the converted model cannot be kept in {gguf} (not a directory)")
        and told.count("\n") == 1
    )
    assert gguf.read_bytes() == b"GGUF"


def test_a_failed_copy_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_cache, "digest_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gguf_cache.store(tmp_path / "a" / "copy", tiny.network(), tiny.tokenizer())
    assert list((tmp_path / "a").iterdir()) == []


# --- the Hub, on loopback

COMMIT = "a" * 40
ANSWERS = {
    "gated/model": (403, "GatedRepo"),
    "closed/model": (401, "GatedRepo"),
    "nobody/nothing": (401, "RepoNotFound"),
    "meta-llama/Llama-3.1-8B-Instrukt": (404, "RepoNotFound"),
    "old/model": (404, "RevisionNotFound"),
    "only/gguf": (404, "EntryNotFound"),
    "broken/model": (500, ""),
}


class Hub(BaseHTTPRequestHandler):
    """Speaks as much of the Hub as one download of a model needs, from the folder `served`."""

    served: Path

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repository = "/".join(parts[:2])
        status, code = ANSWERS.get(repository, (200, ""))
        files = sorted(self.served.iterdir())
        headers: dict[str, str] = {"X-Repo-Commit": COMMIT}
        content = b""
        if status != 200:
            headers = {"X-Error-Code": code} if code else {}
        elif path.startswith("/api/models") and "tree" in parts:
            rows = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "b" * 40} for f in files]
            content = json.dumps(rows).encode()
        elif path.startswith("/api/models"):
            siblings = [{"rfilename": file.name} for file in files]
            content = json.dumps(
                {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
            ).encode()
        elif not (self.served / parts[-1]).is_file():
            status = 404
        else:
            content = (self.served / parts[-1]).read_bytes()
            headers["ETag"] = f'"{hash(parts[-1]) & 0xFFFFFFFF:040x}"'
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, text)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a process that sees the Hub on loopback and an empty cache."""
    served = saved(tmp_path / "served")
    (served / "pytorch_model.bin").write_bytes(b"not wanted")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Hub,), {"served": served}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {
        **{
            name: text
            for name, text in os.environ.items()
            if not name.startswith("HF_") and "proxy" not in name.lower()
        },
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    server.shutdown()
    thread.join()
    server.server_close()


FIND = """
import json, sys
from dropkv.checkpoints import find_checkpoint
from dropkv.errors import ModelError
out = {}
for name in json.loads(sys.argv[1]):
    try:
        found = find_checkpoint(*name)
        files = sorted(file.name for file in found.folder.iterdir())
        out["@".join(name)] = [found.id, found.source, found.revision, files, [file.name for file in found.weights]]
    except ModelError as error:
        out[name[0]] = str(error)
print(json.dumps([out, "torch" in sys.modules]))
"""


def find(environment: dict[str, str], *names: list[Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", FIND, json.dumps(names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found, torch_was_imported = json.loads(done.stdout)
    assert not torch_was_imported and not done.stderr
    return dict(found)


def test_what_the_hub_refuses(hub: dict[str, str]) -> None:
    lines = find(hub, *([name, "v9"] if name == "old/model" else [name] for name in ANSWERS))
    for name in ("gated/model", "closed/model"):
        assert f"licence must be accepted first; do so at https://huggingface.co/{name}" in lines[name]
    assert "no such model on the Hub and no such folder here; check the spelling" in lines["nobody/nothing"]
    assert "did you mean meta-llama/Llama-3.1-8B-Instruct;" in lines["meta-llama/Llama-3.1-8B-Instrukt"]
    assert "has no revision v9" in lines["old/model"]
    assert "has no config.json" in lines["only/gguf"]
    assert lines["broken/model"].startswith("broken/model: ")
    assert all("\n" not in line and line.startswith(name) for name, line in lines.items())


def test_a_download_and_then_no_network(hub: dict[str, str]) -> None:
    expected = ["some/model", "hub", COMMIT]
    found = find(hub, ["some/model"])["some/model"]
    assert found[:3] == expected and found[4] == ["model.safetensors"]
    assert "tokenizer.json" in found[3] and "pytorch_model.bin" not in found[3]
    for offline in ({**hub, "HF_HUB_OFFLINE": "1"}, {**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}):
        again = find(offline, ["some/model"], ["some/model", COMMIT], ["other/model"])
        assert again["some/model"] == again[f"some/model@{COMMIT}"] == found
        assert "not downloaded yet, and the Hub cannot be reached" in again["other/model"]
        assert "use --model smollm2-135m" in again["other/model"]
