"""Fidelity: what is quoted, its numbers against plain references that keep everything, and what reaches the file."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dropkv
from dropkv.cache import Prefix
from dropkv.compression import compress_document
from dropkv.documents import Document
from dropkv.errors import ModelError
from dropkv.fidelity import CUE, PASSAGE, HeldOut, Predictions, compare, hold_out, predict, predict_alone
from dropkv.methods import get
from dropkv.models import Model
from dropkv.observers import Observation
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.settings import CompressSettings
from formats import read_header
from tests import tiny
from tests.dropkv.test_prefill import ids, seam_of

N = 90
HEAD = 6
TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711. The ship is Evergreen.\n\n" * 3


def held_of(model: Model, document: list[int], room: int = 400) -> HeldOut:
    held = hold_out(seam_of(model), document, HEAD, room)
    assert held is not None
    return held


def observation_of(model: Model, document: list[int], observe: str) -> Observation:
    return plan_tail(8, N) if observe == "tail" else plan_replays(seam_of(model), document, HEAD, 32)


def plain(model: Model, sequence: list[int], held: HeldOut, masks: list[Tensor] | None = None) -> Predictions:
    """One plain forward call over the whole sequence, which ends in the held-out ids; masks: additive, one [heads, T, T] for each layer."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        assert masks is not None
        group = q.shape[1] // k.shape[1]
        weights = torch.softmax(
            q @ k.repeat_interleave(group, 1).transpose(2, 3) * scaling + masks[module.layer_idx], -1
        )
        return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), None

    AttentionInterface.register("masked", attention)
    AttentionMaskInterface.register("masked", lambda *a, **k: None)
    model.network.set_attn_implementation("eager" if masks is None else "masked")
    with torch.inference_mode():
        logits = model.network(input_ids=torch.tensor([sequence])).logits[0]
    model.network.set_attn_implementation("dropkv")
    base = len(sequence) - len(held.ids)
    nll, best, target = [], [], []
    for index in held.scored:
        row = logits[base + index - 1].double()
        target.append(held.ids[index])
        nll.append(float(row.logsumexp(0) - row[held.ids[index]]))
        best.append(int(row.argmax()))
    return Predictions(tuple(nll), tuple(best), tuple(target))


def same(mine: Predictions, theirs: Predictions) -> None:
    assert mine.target == theirs.target and mine.best == theirs.best
    assert mine.nll == pytest.approx(theirs.nll, abs=1e-5)


@pytest.mark.parametrize("observe", ["tail", "replay"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_three_predictions_equal_plain_references(family: str, observe: str) -> None:
    """Full, pruned and alone, float64: the full cache is never there, and still its predictions are those of the plain model."""
    model = tiny.model(family, dtype=torch.float64)
    document = ids(N)
    held = held_of(model, document)
    got = prefill(
        model, document, observation_of(model, document, observe), get("adadropkv"), 30, slice_tokens=40, held=held
    )
    assert got.predictions is not None
    same(got.predictions, plain(model, [*document, *held.ids], held))
    prefix = Prefix(got.layers, model.geometry, N)
    same(predict_alone(model, prefix, document[:HEAD], held), plain(model, [*document[:HEAD], *held.ids], held))
    total = N + len(held.ids)
    masks = []
    for entries in got.layers:
        seen = torch.ones(4, total, total, dtype=torch.bool).tril()
        seen[:, N:, :N] = False
        for head in range(4):
            own = entries.positions[int(entries.offsets[head // 2]) : int(entries.offsets[head // 2 + 1])]
            seen[head, N:, own.long()] = True
        masks.append(torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf))
    pruned = predict(model, prefix, held)
    same(pruned, plain(model, [*document, *held.ids], held, masks))
    assert pruned.nll != pytest.approx(got.predictions.nll, abs=1e-3)


@pytest.mark.parametrize("observe", ["tail", "replay"])
def test_sliding_layers(observe: str) -> None:
    """Quoted tokens see no further than a window in them, with the full cache as with the file, which keeps that window."""
    model = tiny.model("mistral", dtype=torch.float64, sliding_window=24)
    document = ids(N)
    held = held_of(model, document)
    got = prefill(model, document, observation_of(model, document, observe), get("dropkv"), 30, held=held)
    assert got.predictions is not None
    want = plain(model, [*document, *held.ids], held)
    same(got.predictions, want)
    same(predict(model, Prefix(got.layers, model.geometry, N), held), want)


@pytest.mark.parametrize("observe", ["tail", "replay"])
def test_what_is_kept_does_not_depend_on_being_measured(tiny_llama: Model, observe: str) -> None:
    document = ids(N)
    observation = observation_of(tiny_llama, document, observe)
    with_held, without = (
        prefill(tiny_llama, document, observation, get("adadropkv"), 30, held=held)
        for held in (held_of(tiny_llama, document), None)
    )
    assert without.predictions is None and without.held_seconds == 0 < with_held.held_seconds
    for mine, theirs in zip(with_held.layers, without.layers, strict=True):
        assert mine.positions.equal(theirs.positions) and mine.offsets.equal(theirs.offsets)
        assert mine.keys.equal(theirs.keys) and mine.values.equal(theirs.values) and mine.scores.equal(theirs.scores)


@pytest.mark.parametrize("observe", ["tail", "replay"])
def test_nothing_is_lost_at_budget_one(tiny_model: Model, observe: str) -> None:
    made = compress_document(tiny_model, Document.of(TEXT, "t"), CompressSettings(budget=1.0, observe=observe))
    values = made.metadata.fidelity
    assert values is not None and made.report.fidelity == values
    assert values["agreement"] == 1.0 and values["right"] == values["right_full"]
    assert values["nll"] == pytest.approx(values["nll_full"], abs=1e-3)
    assert made.report.fidelity_seconds > 0


def test_passages_cover_the_document_evenly(tiny_llama: Model) -> None:
    document = list(range(1000, 3000))
    held = hold_out(seam_of(tiny_llama), document, HEAD, 4000)
    assert held is not None
    body = len(document) - HEAD
    count = len(held.passages)
    for number, (start, stop) in enumerate(held.passages):
        assert stop - start == PASSAGE
        assert HEAD + number * body // count <= start and stop <= HEAD + (number + 1) * body // count
    quoted = [held.ids[index] for index in held.scored]
    assert quoted == [token for start, stop in held.passages for token in document[start + CUE : stop]]
    assert held.rows(100) == [100 + index - 1 for index in held.scored]


def test_the_rarest_passage_of_each_part_is_quoted(tiny_llama: Model) -> None:
    """Four parts of 40 tokens, all alike but for a stretch of tokens that stand nowhere else."""
    document = [1] * HEAD + [5, 6] * 80
    places = [HEAD + 3, HEAD + 50, HEAD + 100, HEAD + 144]
    for number, place in enumerate(places):
        document[place + CUE : place + PASSAGE] = range(100 * (number + 1), 100 * (number + 1) + PASSAGE - CUE)
    assert [start for start, _ in held_of(tiny_llama, document).passages] == places


@pytest.mark.parametrize("room", [0, 17, 18, 34, 35, 60, 200])
def test_a_quote_fits_its_room(tiny_llama: Model, room: int) -> None:
    """Fewer passages where little room is left behind the document, and no measurement where there is none for one."""
    held = hold_out(seam_of(tiny_llama), ids(400), HEAD, room)
    assert (held is None) == (room < PASSAGE + 2)
    assert held is None or len(held.ids) <= room


@pytest.mark.parametrize(("body", "scored"), [(1, None), (2, 1), (3, 1), (5, 2), (15, 12), (16, 13), (33, 26)])
def test_short_documents_are_quoted_as_far_as_they_go(tiny_llama: Model, body: int, scored: int | None) -> None:
    held = hold_out(seam_of(tiny_llama), ids(HEAD + body), HEAD, 400)
    assert (None if held is None else len(held.scored)) == scored
    assert held is None or all(HEAD <= start < stop <= HEAD + body for start, stop in held.passages)


def test_numbers_of_a_comparison() -> None:
    """Four tokens by hand: nats, shares, and what a share of them is of."""
    held = HeldOut((9, 1, 2, 3, 4), (1, 2, 3, 4), ((0, 5),))
    full = Predictions((0.5, 0.5, 1.0, 2.0), (1, 2, 3, 7), (1, 2, 3, 4))
    pruned = Predictions((1.0, 2.0, 1.0, 2.0), (1, 6, 3, 4), (1, 2, 3, 4))
    alone = Predictions((3.0, 3.0, 3.0, 3.0), (5, 5, 5, 5), (1, 2, 3, 4))
    assert compare(held, full, pruned, alone) == {
        "kind": "quotes", "passages": 1, "tokens": 4, "kept_information": 0.75, "agreement": 0.5, "right": 0.75,
        "right_full": 0.75, "right_alone": 0.0, "still_right": 0.6667, "nll": 1.5, "nll_full": 1.0, "nll_alone": 3.0,
    }  # fmt: skip


def test_a_document_worth_nothing_has_no_share() -> None:
    held = HeldOut((9, 1), (1,), ((0, 2),))
    wrong = Predictions((2.0,), (7,), (1,))
    values = compare(held, wrong, replace(wrong, nll=(2.5,)), replace(wrong, nll=(2.05,)))
    assert values["kept_information"] is None and values["still_right"] is None and values["nll"] == 2.5


def test_it_is_stored_unless_it_is_not_wanted(tiny_llama: Model, tmp_path: Any) -> None:
    made = dropkv.compress(TEXT, model=tiny_llama, budget=0.5, chunk=32)
    made.save(tmp_path / "with.kv")
    assert read_header(tmp_path / "with.kv").metadata.fidelity == made.report.fidelity
    assert made.report.fidelity is not None and set(made.report.fidelity) >= {"nll", "nll_full", "agreement", "tokens"}
    again = dropkv.compress(TEXT, model=tiny_llama, budget=0.5, chunk=32)
    assert again.report.fidelity == made.report.fidelity
    without = dropkv.compress(TEXT, model=tiny_llama, budget=0.5, chunk=32, fidelity=False)
    without.save(tmp_path / "without.kv")
    assert read_header(tmp_path / "without.kv").metadata.fidelity is None
    assert without.report.fidelity is None and without.report.fidelity_seconds == 0


def test_likelihoods_that_are_not_finite_are_no_measurement(tmp_path: Any) -> None:
    """A head that overflows: the entries are sound, so the file is written, without numbers that JSON does not have."""
    model = tiny.model("llama")
    with torch.no_grad():
        model.network.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match="use another --dtype or --method auto"):  # nats would be none
        dropkv.compress(TEXT, model=model, budget=0.5, chunk=32, method="auto-told")
    made = dropkv.compress(TEXT, model=model, budget=0.5, chunk=32)
    made.save(tmp_path / "made.kv")
    assert made.report.fidelity is None and read_header(tmp_path / "made.kv").metadata.fidelity is None
    assert made.report.fidelity_missing == "the model's predictions are not finite"


@pytest.mark.slow
def test_more_of_a_document_is_lost_at_smaller_budgets(smollm2: Model) -> None:
    """A planted fact in prose, real model: kept information falls with the budget, from all to less than half, where the
    paper's method keeps far less."""
    from pydoc_data.topics import topics

    draw = random.Random(5)
    prose = "\n".join(topics[name] for name in sorted(topics))
    start = draw.randrange(len(prose) - 4000)
    text = (
        prose[start : start + 1500]
        + " The number of the locker in Faro is 7306152. "
        + prose[start + 1500 : start + 3000]
    )
    found = []
    for budget in (0.5, 0.2, 0.05):
        values = dropkv.compress(text, model=smollm2, budget=budget).report.fidelity
        assert values is not None
        found.append(values)
    kept = [values["kept_information"] for values in found]
    assert kept[0] > kept[1] > 0.9 and 0.3 < kept[2] < 0.75, kept  # measured: 1.02, 0.98, 0.54
    paper = dropkv.compress(text, model=smollm2, budget=0.05, method="adadropkv").report.fidelity
    assert paper is not None and paper["kept_information"] < kept[2] / 2, paper  # measured: 0.12
    assert found[0]["agreement"] > found[1]["agreement"] > found[2]["agreement"]
