"""The sliced one-pass prefill against a plain reference that keeps everything, and against the plain model at budget 1.0."""

from __future__ import annotations

import pytest
import torch

from dropkv.budgets import forced_positions, select
from dropkv.cache import Prefix, Tail
from dropkv.documents import Document
from dropkv.errors import ModelError
from dropkv.generate import Session
from dropkv.methods import get
from dropkv.observers import Observation
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.prompts import Seam
from tests import tiny
from tests.dropkv.reference import odds_scores, record, tail_scores

N = 90


def ids(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCABULARY - 10, (count,), generator=generator).tolist()


def seam_of(model) -> Seam:
    return Seam.of(model.tokenizer, name=model.id)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("chunk,size", [(512, 2048), (32, 2048), (32, 30), (7, 13), (1, 1), (40, 89)])
def test_one_pass_replay_equals_the_reference(family, chunk, size):
    """Entries, order, keys, values and scores of every layer, for chunks and slices that do and do not divide."""
    model = tiny.model(family, dtype=torch.float64)
    document = ids(N)
    observation = plan_replays(seam_of(model), document, 6, chunk)
    method = get("adadropkv").under_replay(6)
    got = prefill(model, document, observation, method, 30, slice_tokens=size)
    layers = record(model.network, document, observation)
    assert len(got.layers) == len(layers) == 3
    for mine, theirs in zip(got.layers, layers, strict=True):
        raw = odds_scores(theirs, N, observation, 2)
        forced = forced_positions(N, 6, 4)
        want = select(
            method.pooled(raw.float()), 30, forced=forced, rule="head-adaptive", alpha=0.2, unpooled=raw.float()
        )
        assert mine.offsets.tolist() == [0, *want.counts.cumsum(0).tolist()]
        assert mine.positions.tolist() == want.positions.tolist()
        assert mine.admit.tolist() == want.admit.tolist()
        heads = torch.repeat_interleave(torch.arange(2), want.counts)
        for part, name in ((mine.keys, "k"), (mine.values, "v")):
            assert float((part - theirs[name][heads, want.positions]).abs().max()) < 1e-6
        assert torch.allclose(mine.scores.double(), raw[heads, want.positions], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("window,size", [(8, 2048), (8, 5), (200, 40)])
def test_tail_equals_the_reference(family, window, size):
    """Also where the window lies in two slices, and where the document is shorter than the window."""
    model = tiny.model(family, dtype=torch.float64)
    document = ids(N)
    observation = plan_tail(window, N)
    method = get("dropkv")
    got = prefill(model, document, observation, method, 20, slice_tokens=size)
    for mine, theirs in zip(got.layers, record(model.network, document, observation), strict=True):
        raw = tail_scores(theirs, N, min(window, N), 2).float()
        want = select(method.pooled(raw), 20, forced=8, unpooled=raw)
        assert mine.positions.tolist() == want.positions.tolist()
        heads = torch.repeat_interleave(torch.arange(2), want.counts)
        assert float((mine.keys - theirs["k"][heads, want.positions]).abs().max()) < 1e-6


@pytest.mark.parametrize("observe", ["tail", "replay"])
def test_budget_one_gives_the_logits_of_the_plain_model(tiny_model, observe):
    """Question tokens one by one and at once, float32, against transformers' own attention over the whole text."""
    document, question = ids(N), ids(11, seed=2)
    observation = plan_tail(8, N) if observe == "tail" else plan_replays(seam_of(tiny_model), document, 6, 32)
    got = prefill(tiny_model, document, observation, get("full"), N, slice_tokens=40)
    network = tiny_model.network
    network.set_attn_implementation("sdpa")
    with torch.inference_mode():
        want = network(input_ids=torch.tensor([document + question])).logits[0]
    network.set_attn_implementation("dropkv")
    session = Session(tiny_model, seam_of(tiny_model), Prefix(got.layers, tiny_model.geometry, N))
    at_once = session.forward(question, Tail())
    assert float((at_once - want[-1]).abs().max()) < 1e-4
    tail = Tail()
    for offset, token in enumerate(question):
        logits = session.forward([token], tail)
        assert float((logits - want[N + offset]).abs().max()) < 1e-4
    assert len(tail) == len(question)


@pytest.mark.parametrize("method", ["keydiff", "streamingllm", "random", "snapkv", "adakv"])
def test_every_budget_is_spent_exactly(tiny_llama, method):
    """kv_heads * kept entries in every layer, whatever the heads share among themselves."""
    document = ids(N)
    chosen = get(method).under_replay(6)
    got = prefill(tiny_llama, document, plan_replays(seam_of(tiny_llama), document, 6, 32), chosen, 25)
    for layer in got.layers:
        assert layer.positions.numel() == 50 and int(layer.offsets[-1]) == 50
        for head in range(2):
            own = layer.positions[int(layer.offsets[head]) : int(layer.offsets[head + 1])].tolist()
            assert len(set(own)) == len(own)


def test_a_needle_outside_the_kept_set_is_gone(tiny_llama):
    """The answer is the same whatever stood at an evicted position, and changes when a kept one does: no mask is misaligned."""
    n = 40
    keep_first = get("streamingllm")
    first, second = ids(n), ids(n)
    second[20] = (second[20] + 100) % 500 + 3
    outputs = []
    for document in (first, second):
        got = prefill(tiny_llama, document, plan_tail(8, n), keep_first, 10)
        assert {*got.layers[0].positions.tolist()} == {0, 1, 2, 3, 34, 35, 36, 37, 38, 39}
        outputs.append(got.layers[0].values)
    assert torch.equal(outputs[0], outputs[1])


def test_sliced_prefill_restores_the_network(tiny_llama):
    before = list(tiny_llama.network.model.layers)
    with pytest.raises(RuntimeError, match="stop here"):
        prefill(tiny_llama, ids(N), plan_tail(8, N), get("dropkv"), 20, progress=lambda done, total: stop())
    assert list(tiny_llama.network.model.layers) == before


def stop() -> None:
    raise RuntimeError("stop here")


def test_values_that_are_not_finite_are_named():
    model = tiny.model("llama")
    with torch.no_grad():
        model.network.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match="layer 1 computed keys or values that are not finite"):
        prefill(model, ids(20), plan_tail(8, 20), get("dropkv"), 10)


def test_a_document_of_nothing_but_sinks(tiny_llama):
    """Shorter than head and sinks: there is nothing to replay and everything is kept."""
    document = ids(5)
    observation = plan_replays(seam_of(tiny_llama), document, 6, 32)
    assert observation == Observation(0, (), observation.description)
    got = prefill(tiny_llama, document, observation, get("adadropkv").under_replay(6), 5)
    assert [layer.positions.numel() for layer in got.layers] == [10, 10, 10]


def test_replays_cover_the_document_once():
    model = tiny.model("llama")
    document = ids(N)
    observation = plan_replays(seam_of(model), document, 6, 32)
    chunks = [probe.scored for probe in observation.probes]
    assert chunks == [(6, 38), (38, 70), (70, 90)]
    asking = seam_of(model).question_ids("Repeat the previous context exactly.")
    assert list(observation.probes[2].ids) == asking + document[70:]
    assert observation.longest_probe == len(asking) + 32


def test_document_of_the_library_is_the_text(tiny_llama):
    document = Document.of("The code is 4711.", "note")
    assert document.text == "The code is 4711." and document.name == "note"
