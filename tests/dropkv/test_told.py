"""Nats of a document's tokens and what replayed queries weigh by them: float64 definitions, and every family's own logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dropkv.footprint import footprint
from dropkv.kernels.probe import probe_attention
from dropkv.methods import LayerContext, get
from dropkv.observers import Probe
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.prompts import Seam
from dropkv.told import nats_of, weights
from tests import tiny

N = 70


def document() -> list[int]:
    return torch.randint(3, 590, (N,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("family", tiny.BREADTH)
def test_nats_are_those_of_the_plain_models_logits(family, monkeypatch):
    """Slices of the layers and of the head against one eager call, float64; logits are scaled and capped as the family does."""
    monkeypatch.setattr("dropkv.head.LOGITS", 30 * tiny.VOCABULARY)  # three slices
    model = tiny.model(family, dtype=torch.float64)
    steps: list[tuple[int, int]] = []
    one, other = document(), document()[::-1]
    got = nats_of(model, [one], 40, lambda done, total: steps.append((done, total)))[0]
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert (nats_of(model, [other, one], 40)[1] - got).abs().max() < 2e-6
    model.network.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model.network(input_ids=torch.tensor([one]), use_cache=False).logits[0].double()
    model.network.set_attn_implementation("dropkv")
    want = -logits[:-1].log_softmax(-1).gather(1, torch.tensor(one[1:]).unsqueeze(1)).squeeze(1)
    assert got[0] == 0 and float((got[1:] - want).abs().max()) < 2e-6 and float(want.std()) > 0.01
    assert type(next(iter(model.network.base_model.children()))).__name__ != "_Known"


def test_a_document_of_one_token_has_no_nats():
    assert nats_of(tiny.model("llama"), [[5], [7]], 40).tolist() == [[0.0], [0.0]]


def test_a_query_weighs_the_token_that_it_predicts():
    """An instruction of three tokens, then positions 4 to 7 again: its last token predicts 4, the last token of all nothing."""
    told = torch.arange(10.0).expand(2, 10) * torch.tensor([[1.0], [10.0]])
    own = weights(told, Probe((0,) * 7, (4, 8), ((0, 4),)))
    assert own.tolist() == [[0, 0, 4, 5, 6, 7, 0], [0, 0, 40, 50, 60, 70, 0]]


@pytest.mark.parametrize("fused_on_cpu", [True, False])
def test_weighed_scores_are_their_definition(fused_on_cpu):
    """Two KV heads of two query heads, six keys that are scored, four of the probe's own; every sum written out, in float64."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v, told = draw(4, 4, 8), draw(2, 10, 8), draw(2, 10, 8), draw(2, 4).square()
    told[0, 1] = 0
    q[1, 2] *= 9  # one p near 1
    method = get("auto-told")
    context = LayerContext(k, v, 0.4)
    softcap = None if fused_on_cpu else 50.0
    _, got = probe_attention(
        q,
        k,
        v,
        scale=0.4,
        columns=6,
        told=told,
        softcap=softcap,
        score=lambda queries: method.observe(queries, context),
    )
    raw, paid, summed = torch.zeros(3, 2, 6, dtype=torch.float64)
    for head in range(4):
        own, total = head // 2, torch.zeros(6, dtype=torch.float64)
        for t in range(4):
            logits = k[own, : 7 + t] @ q[head, t] * 0.4
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            p = torch.softmax(logits, 0)
            a = p @ v[own, : 7 + t]
            step = (p / (1 - p + 1e-6))[:6] * (a - v[own, :6]).norm(dim=-1)
            raw[own] = torch.maximum(raw[own], told[own, t] * step)
            paid[own] = torch.maximum(paid[own], told[own, t] * p[:6])
            total += step
        summed[own] = torch.maximum(summed[own], total)
    assert got is not None
    torch.testing.assert_close(got.raw.double(), raw, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got.beside.double(), torch.stack([paid, summed]), rtol=1e-6, atol=1e-9)


def test_nats_are_read_for_replays_alone():
    """Three readings with replays, progress counts each; with the document's tail as observer two, and every query counts alike."""
    model = tiny.model("llama")
    seam = Seam.of(model.tokenizer, name=model.id)
    replays = plan_replays(seam, document(), 6, 32)
    for observation, readings in ((replays, 3), (plan_tail(8, N), 2)):
        steps: list[tuple[int, int]] = []
        note = partial(_note, steps)
        prefill(model, document(), observation, get("auto-told"), 20, progress=note)
        assert steps == [(done, 3 * readings) for done in range(1, 3 * readings + 1)]
    alike = replace(get("auto-twice"), together=get("auto-told").together)
    for mine, theirs in zip(
        prefill(model, document(), plan_tail(8, N), get("auto-told"), 20).layers,
        prefill(model, document(), plan_tail(8, N), alike, 20).layers,
        strict=True,
    ):
        assert torch.equal(mine.positions, theirs.positions) and torch.equal(mine.admit, theirs.admit)


def _note(steps: list[tuple[int, int]], done: int, total: int) -> None:
    steps.append((done, total))


def test_the_expected_memory_counts_the_heads_logits():
    model = tiny.model("llama")
    observation = plan_replays(Seam.of(model.tokenizer, name=model.id), document(), 6, 32)
    twice, told = (
        footprint(model, N, observation, None, methods=(get(name),), kept=20) for name in ("auto-twice", "auto-told")
    )
    assert twice.between == 0 and told.between == 3 * 4 * ((1 << 24) // 600 * 600)
