"""The same model is accepted however it was loaded, another one is refused with both values."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import formats
from dropkv.digests import digest_samples
from dropkv.errors import IdentityError
from dropkv.identity import check, config_fields, describe, mismatches, tokenizer_fingerprint
from dropkv.models import Model, load_model, wrap_model
from dropkv.prompts import Seam
from dropkv.quiet import quiet
from dropkv.weights import weights_agree, weights_fingerprint
from tests import tiny


def seam_of(model: Model) -> Seam:
    return Seam.of(model.tokenizer, name=model.id)


def metadata(model: Model, seam: Seam | None = None) -> formats.Metadata:
    """What a file made with this model carries, after a way through JSON text."""
    identity, tokenizer = describe(model, seam or seam_of(model))
    shape = model.geometry[0]
    layer = formats.LayerInfo("full", shape.query_heads, shape.kv_heads, shape.d_k, shape.d_v, None, 0)
    made = formats.Metadata(
        writer="0",
        model=identity,
        tokenizer=tokenizer,
        document=formats.DocumentInfo("book.txt", "0" * 64, 9, 3, 9),
        method={},
        observer={},
        budget=formats.BudgetInfo(0.5, 4, "uniform", None, 1, 1, True),
        layers=(layer,) * len(model.geometry),
        dtype="float32",
        rope=model.rope,
        fidelity=None,
    )
    return formats.Metadata.from_json(json.loads(json.dumps(made.to_json())))


def changed(network: Any, change: Any, only: str = "") -> Any:
    """The network with `change` applied to every parameter whose name holds `only`, in place."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if only in name:
                parameter.copy_(change(parameter))
    return network


# --- the same weights


def test_a_model_is_itself(tiny_model: Model) -> None:
    seam = seam_of(tiny_model)
    assert mismatches(metadata(tiny_model), tiny_model, seam) == []
    check(metadata(tiny_model), tiny_model, seam)


@pytest.mark.parametrize("written", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("read", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("origin", ["bfloat16", "float32"])
def test_the_same_weights_in_any_type(written: str, read: str, origin: str) -> None:
    def fingerprint(dtype: str) -> dict[str, Any]:
        network = tiny.network().to(getattr(torch, origin))
        return weights_fingerprint(network.to(getattr(torch, dtype)))

    assert weights_agree(fingerprint(written), fingerprint(read))


def test_rounding_twice_is_accepted() -> None:
    once = tiny.network().to(torch.bfloat16)
    twice = tiny.network().to(torch.float16).to(torch.bfloat16)
    differing = [(a != b).float().mean().item() for a, b in zip(once.parameters(), twice.parameters(), strict=True)]
    assert max(differing) > 0.01  # the case exists
    left = weights_fingerprint(twice)
    for other in (
        once,
        tiny.network(),
        tiny.network().to(torch.float16),
        once.to(torch.float16),
        once.to(torch.float32),
    ):
        assert weights_agree(left, weights_fingerprint(other)) and weights_agree(weights_fingerprint(other), left)


def test_shards_and_names_do_not_count(tmp_path: Path) -> None:
    network = tiny.network()
    for name, size in (("one", "1GB"), ("many", "60KB")):
        with quiet():
            network.save_pretrained(tmp_path / name, max_shard_size=size)
        tiny.tokenizer().save_pretrained(tmp_path / name)
    one, many = load_model(str(tmp_path / "one")), load_model(str(tmp_path / "many"), dtype="bf16")
    assert len(many.weights) > 3
    assert describe(one, seam_of(one))[0].weights["files"] != describe(many, seam_of(many))[0].weights["files"]
    assert mismatches(metadata(one), many, seam_of(many)) == []


def test_equal_files_agree_at_once() -> None:
    left = weights_fingerprint(tiny.network(seed=1)) | {"files": "a" * 32}
    right = weights_fingerprint(tiny.network(seed=2)) | {"files": "a" * 32}
    assert weights_agree(left, right) and not weights_agree(left, right | {"files": None})


def test_smollm2_from_its_gguf_and_from_safetensors(smollm2: Model, tmp_path: Path) -> None:
    config = copy.deepcopy(smollm2.network.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(tmp_path)
    halves = {name: parameter.to(torch.bfloat16) for name, parameter in smollm2.network.named_parameters()}
    save_file(halves, tmp_path / "model.safetensors", {"format": "pt"})
    smollm2.tokenizer.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert mismatches(metadata(smollm2), model, seam_of(model)) == []
    assert config_fields(model) == config_fields(smollm2)


# --- other weights


def relative(share: float) -> Any:
    generator = torch.Generator().manual_seed(7)

    def change(parameter: Tensor) -> Tensor:
        return parameter * (1 + share * torch.randn(parameter.shape, generator=generator))

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_weights_are_refused(dtype: torch.dtype) -> None:
    original = weights_fingerprint(tiny.network(dtype=dtype))
    assert not weights_agree(original, weights_fingerprint(tiny.network(seed=1, dtype=dtype)))
    assert not weights_agree(original, weights_fingerprint(changed(tiny.network(), relative(0.01)).to(dtype)))
    assert not weights_agree(original, weights_fingerprint(changed(tiny.network(), relative(0.05), "q_proj").to(dtype)))
    assert weights_agree(original, weights_fingerprint(changed(tiny.network(), relative(1e-9)).to(dtype)))


TYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("read", TYPES)
@pytest.mark.parametrize("written", TYPES)
def test_a_slight_fine_tune_is_refused_in_every_pair_of_types(written: str, read: str) -> None:
    """A change of a thousandth moves a bfloat16 value by a quarter of its last place."""
    base, tuned = tiny.network(num_hidden_layers=8), changed(tiny.network(num_hidden_layers=8), relative(1e-3))
    left = weights_fingerprint(base.to(getattr(torch, written)))
    assert not weights_agree(left, weights_fingerprint(tuned.to(getattr(torch, read))))
    assert weights_agree(left, weights_fingerprint(tiny.network(num_hidden_layers=8).to(getattr(torch, read))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_edit_of_one_tensor_of_many_is_refused(dtype: torch.dtype) -> None:
    def network() -> Any:
        return tiny.network(num_hidden_layers=30, hidden_size=32, intermediate_size=48)

    edited = changed(network(), relative(0.05), "layers.17.mlp.down_proj")
    assert not weights_agree(weights_fingerprint(network().to(dtype)), weights_fingerprint(edited.to(dtype)))


def test_values_that_all_moved_one_way_are_a_rounding_and_both_ways_a_fine_tune() -> None:
    once = tiny.network().to(torch.bfloat16)
    twice = weights_fingerprint(tiny.network().to(torch.float16).to(torch.bfloat16))
    left, right = (
        torch.frombuffer(bytearray(base64.b64decode(one["samples"])), dtype=torch.float32)
        for one in (weights_fingerprint(once), twice)
    )
    moved = left != right
    assert 3 < int(moved.sum()) < 0.12 * len(left)
    some = torch.arange(len(left))[moved][::2]
    left[some], right[some] = right[some].clone(), left[some].clone()  # as many and as small, to both sides
    swapped = [{**twice, "samples": base64.b64encode(values.numpy().tobytes()).decode()} for values in (left, right)]
    assert not weights_agree(*swapped)


def test_equal_files_do_not_outweigh_an_edit_between_their_sampled_blocks() -> None:
    left = weights_fingerprint(tiny.network()) | {"files": "a" * 32}
    right = weights_fingerprint(changed(tiny.network(), relative(0.5), "layers.1.mlp.up_proj")) | {"files": "a" * 32}
    assert not weights_agree(left, right)


def test_a_small_change_shows_in_float32_alone() -> None:
    moved = changed(tiny.network(), relative(1e-5))
    assert not weights_agree(weights_fingerprint(tiny.network()), weights_fingerprint(moved))
    coarse = weights_fingerprint(tiny.network().to(torch.bfloat16))
    assert weights_agree(coarse, weights_fingerprint(moved.to(torch.bfloat16)))  # documented as not caught


def test_other_shapes_and_malformed_fingerprints_agree_with_nothing() -> None:
    good = weights_fingerprint(tiny.network())
    assert not weights_agree(good, weights_fingerprint(tiny.network(num_hidden_layers=2)))
    for broken in (
        {},
        {**good, "kind": "sampled-2"},
        {**good, "samples": "%%"},
        {**good, "samples": 3},
        {**good, "samples": ""},
    ):
        assert not weights_agree(good, broken) and not weights_agree(broken, good)
    short = base64.b64encode(base64.b64decode(good["samples"])[:-4]).decode()
    assert not weights_agree(good, {**good, "samples": short})
    nans = base64.b64encode(b"\xff" * len(base64.b64decode(good["samples"]))).decode()
    assert not weights_agree(good, {**good, "samples": nans})


def test_samples_are_where_they_were() -> None:
    network = tiny.network()
    fingerprint = weights_fingerprint(network)
    values = torch.frombuffer(bytearray(base64.b64decode(fingerprint["samples"])), dtype=torch.float32)
    assert fingerprint["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert len(values) == 8 * len(list(network.parameters()))
    embedding = network.get_input_embeddings().weight.detach().flatten()
    golden = 0x9E3779B97F4A7C15
    places = [int(((i + 1) * golden % 2**64) / 2**64 * embedding.numel()) for i in range(8)]
    assert torch.equal(values[:8], embedding[places])
    assert len({place % 64 for place in places}) == 8  # no two in one column


def test_files_are_sampled_cheaply(tmp_path: Path) -> None:
    big = tmp_path / "model.safetensors"
    with open(big, "wb") as file:
        file.truncate(3 << 30)
    started = time.perf_counter()
    before = digest_samples([big])
    assert time.perf_counter() - started < 2
    with open(big, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert digest_samples([big]) != before
    small = tmp_path / "small"
    small.write_bytes(b"")
    assert digest_samples([small]) != digest_samples([])
    small.write_bytes(b"ab")
    assert digest_samples([small]) == digest_samples([tmp_path / "small"])


# --- config, tokenizer, template


def test_numbers_of_a_config_are_spelt_once() -> None:
    a = tiny.model("llama", rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    b = tiny.model(
        "llama", rms_norm_eps=9.999999747378752e-06, rope_parameters={"rope_type": "default", "rope_theta": 100000}
    )
    assert config_fields(a) == config_fields(b)
    assert config_fields(a)["norm_eps"] == 1e-05 and config_fields(a)["rope"]["rope_theta"] == 100000
    assert config_fields(a)["layers"] == "full"
    assert describe(a, seam_of(a))[0].config_hash == describe(b, seam_of(b))[0].config_hash


def test_a_mistral_is_what_gguf_calls_a_llama(tiny_llama: Model, tiny_mistral: Model) -> None:
    assert config_fields(tiny_mistral)["model_type"] == config_fields(tiny_llama)["model_type"] == "llama"


def test_mixed_layers_are_part_of_the_config() -> None:
    network = tiny.network("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    fields = config_fields(wrap_model(network, tiny.tokenizer(), id="mixed"))
    assert (fields["layers"], fields["sliding_window"]) == ("fss", 32)


def test_tokenizers() -> None:
    same = tokenizer_fingerprint(tiny.tokenizer())
    assert same == tokenizer_fingerprint(tiny.tokenizer(None)) != tokenizer_fingerprint(tiny.spaced_tokenizer())
    for change in (unmark_one, with_a_space, lower_case, other_merges):
        backend = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
        change(backend)
        made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
        assert tokenizer_fingerprint(made) != same, change


def unmark_one(backend: dict[str, Any]) -> None:
    backend["added_tokens"][1]["special"] = False


def with_a_space(backend: dict[str, Any]) -> None:
    backend["pre_tokenizer"]["add_prefix_space"] = True


def lower_case(backend: dict[str, Any]) -> None:
    backend["normalizer"] = {"type": "Lowercase"}


def other_merges(backend: dict[str, Any]) -> None:
    backend["model"]["merges"].reverse()


def test_a_large_vocabulary_is_quick(smollm2: Model) -> None:
    started = time.perf_counter()
    tokenizer_fingerprint(smollm2.tokenizer)
    assert time.perf_counter() - started < 1.0  # 49K entries; measured 0.07 s


# --- what the user is told


def message(meta: formats.Metadata, model: Model, **options: Any) -> str:
    with pytest.raises(IdentityError) as caught:
        check(meta, model, seam_of(model), **options)
    line = str(caught.value)
    assert "\n" not in line and meta.model.id in line and model.id in line
    return line


def test_other_weights_tokenizer_and_template_are_named() -> None:
    meta = metadata(tiny.model())
    other = tiny.model(seed=1, id="other")
    line = message(meta, other)
    assert line.startswith("made with other weights: ") and " x float32) in the file" in line and "in other;" in line
    assert (
        "give the model it was made with, tiny-llama, by --model, or accept wrong answers with --allow-mismatch" in line
    )
    check(meta, other, seam_of(other), allow_mismatch=True)

    template = tiny.model(template=tiny.TRIMMING, id="other")
    assert [found.what for found in mismatches(meta, template, seam_of(template))] == ["chat template"]
    assert "another chat template: " in message(meta, template)

    tokenizer = wrap_model(tiny.network(), tiny.spaced_tokenizer(tiny.CHATML.replace("<|im_end|>", "</s>")), id="other")
    assert [found.what for found in mismatches(meta, tokenizer, seam_of(tokenizer))] == ["tokenizer", "chat template"]
    assert "another tokenizer: " in message(meta, tokenizer) and "(and 1 more)" in message(meta, tokenizer)


def test_another_structure_cannot_be_allowed() -> None:
    meta = metadata(tiny.model())
    other = tiny.model(num_key_value_heads=4, id="other")
    for allow in (False, True):
        line = message(meta, other, allow_mismatch=allow)
        assert "another config (num_key_value_heads): 2 in the file, 4 in other" in line
        assert "--allow-mismatch" not in line


def test_fields_of_the_config_are_compared_by_name() -> None:
    meta = metadata(tiny.model())
    other = tiny.model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-4, id="other")
    found = {entry.what: (entry.in_file, entry.in_model) for entry in mismatches(meta, other, seam_of(other))}
    assert set(found) == {"norm_eps", "rope"} and found["norm_eps"] == ("1e-06", "0.0001")
    check(meta, other, seam_of(other), allow_mismatch=True)
    activation = tiny.model(hidden_act="gelu", id="other")
    assert "another config (activation): silu in the file, gelu in other" in message(meta, activation)
    older = dataclasses.replace(meta.model, config={**meta.model.config, "gone": 1})
    assert "another config (gone): 1 in the file, null in tiny-llama" in message(
        dataclasses.replace(meta, model=older), tiny.model()
    )


def test_what_differs_is_shown_and_not_what_is_the_same() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    made, read = (tiny.model(rope_parameters=yarn | {"beta_fast": fast}, id=f"fast-{fast}") for fast in (32.0, 16.0))
    assert 'another config (rope): {"beta_fast": 32} in the file, {"beta_fast": 16} in fast-16.0' in message(
        metadata(made), read
    )


def test_a_file_of_an_older_writer_is_compared_in_what_it_says() -> None:
    model = tiny.model()
    meta = metadata(model)
    fields = {name: value for name, value in meta.model.config.items() if name not in ("activation", "scales")}
    older = dataclasses.replace(
        meta,
        model=dataclasses.replace(meta.model, config=fields),
        tokenizer=dataclasses.replace(meta.tokenizer, fingerprint=tokenizer_fingerprint(model.tokenizer, words=0)),
    )
    assert mismatches(older, model, seam_of(model)) == []
    bare = dataclasses.replace(meta, model=dataclasses.replace(meta.model, config={}))
    assert "another config (head_dim): null in the file, 16 in tiny-llama" in message(bare, model, allow_mismatch=True)


def test_a_hostile_file_cannot_steer_the_terminal_or_fill_it() -> None:
    meta = metadata(tiny.model())
    nasty = "\x1b[2J\n" + "x" * 5000
    weights = {**meta.model.weights, "dtype": nasty, "parameters": [nasty]}
    config = {**meta.model.config, nasty: nasty, "model_type": nasty}
    for changes in ({"weights": weights}, {"config": config}, {"weights": weights, "revision": nasty}):
        identity = dataclasses.replace(meta.model, id=nasty, **changes)
        other = tiny.model(seed=1, id="other")
        with pytest.raises(IdentityError) as caught:
            check(dataclasses.replace(meta, model=identity), other, seam_of(other))
        assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_merges_of_rare_words_are_part_of_the_tokenizer() -> None:
    """Two merges swapped that no word of the fixed text needs: the vocabulary's own words show it."""
    backend = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    before = tokenizer_fingerprint(tiny.tokenizer())
    merges = backend["model"]["merges"]
    found = 0
    for at in range(0, len(merges) - 40, 5):
        swapped = merges.copy()
        swapped[at : at + 40] = reversed(swapped[at : at + 40])
        backend["model"]["merges"] = swapped
        made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
        text_alone = tokenizer_fingerprint(made, words=0) == tokenizer_fingerprint(tiny.tokenizer(), words=0)
        found += text_alone and tokenizer_fingerprint(made) != before
    assert found


def test_no_path_is_stored(tmp_path: Path) -> None:
    with quiet():
        tiny.network().save_pretrained(tmp_path / "secret" / "mine")
    tiny.tokenizer().save_pretrained(tmp_path / "secret" / "mine")
    model = load_model(str(tmp_path / "secret" / "mine"))
    text = json.dumps(metadata(model).to_json())
    assert "secret" not in text and str(tmp_path) not in text and '"mine"' in text
