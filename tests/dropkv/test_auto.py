"""auto: its formula worked by hand, and what the study's recipe of the same name keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dropkv
from benchmarks.question_free.documents import read_documents
from benchmarks.question_free.observers import Observer
from benchmarks.question_free.recipe import Recipe
from benchmarks.question_free.recipes import groups
from benchmarks.question_free.text import Text
from dropkv.bench.survey import Collector
from dropkv.budgets import kept_count
from dropkv.errors import UsageError
from dropkv.methods import LayerScores, Together, get
from dropkv.methods._together import Orders
from dropkv.observers.replay import plan_replays
from dropkv.prefill import prefill, read
from dropkv.prompts import Seam
from dropkv.words import Words
from formats import read_header
from tests import tiny

RECIPES = {  # of benchmarks.question_free
    "stream 0.27": get("auto"),
    "two 0.27, 30 % by step/sum": get("auto-twice"),
    "two told, 30 % by step/sum": get("auto-told"),
    "stream, own layer": replace(get("auto"), together=Together(heads=0.4, scope="layer")),
}
CPU = torch.device("cpu")


def test_the_orders_by_hand():
    """Two layers of two heads, four tokens, the middle two one word, no neighbours."""
    words = Words.made([0, 1, 1, 2], CPU)
    orders = Orders(Together(heads=0.5, balance=1.0, scope="so far"), None, words)
    steps = torch.tensor([[4.0, 2, 2, 0], [0, 0, 1, 3]])  # means 2 and 1
    paid = torch.tensor([[0.4, 0.2, 0, 0], [0, 0.2, 0, 0.2]])  # mean of the heads 0.2, 0.2, 0, 0.1
    sums = torch.tensor([[9.0, 8, 7, 6], [1, 2, 3, 4]])
    own, shared, ties, level = orders.add(LayerScores(steps, torch.stack([paid, sums])))
    assert torch.equal(own, sums) and torch.equal(ties, steps) and level.tolist() == [2, 1]
    # words of x / mean: 2, 2, 2, 0 and 0, 1, 1, 3; standing 0.2, 0.2, 0.2, 0.1
    torch.testing.assert_close(shared, torch.tensor([[0.4, 0.4, 0.4, 0], [0, 0.2, 0.2, 0.3]]))
    more = torch.tensor([[0.2, 0, 0, 0.6], [0.2, 0, 0, 0.6]])  # with the layer before 0.2, 0.1, 0, 0.35
    _, shared, _, _ = orders.add(LayerScores(steps, torch.stack([more, sums])))
    torch.testing.assert_close(shared, torch.tensor([[0.4, 0.2, 0.2, 0], [0, 0.1, 0.1, 1.05]]))
    alone = Orders(Together(scope="layer", balance=0.0), None, words)
    for part in (paid, more):
        _, shared, _, _ = alone.add(LayerScores(steps, torch.stack([part, sums])))
    torch.testing.assert_close(shared, torch.tensor([[0.8, 0, 0, 0], [0, 0, 0, 1.8]]))


def test_the_choice_by_hand():
    """One layer, two heads, six tokens, first and last kept; kept 4 and alpha 0.75: three by the own order, two more by the shared one."""
    method = replace(get("auto"), alpha=0.75, forced_first=1, forced_last=1, pool=None, together=Together(heads=0.5))
    steps = torch.tensor([[0.0, 8, 4, 4, 0, 0], [0, 1, 1, 1, 1, 0]])  # the first head has the larger mean
    sums = torch.tensor([[0.0, 1, 2, 3, 4, 0], [0, 4, 3, 2, 1, 0]])
    layer = LayerScores(steps, torch.stack([torch.ones_like(steps), sums]))
    (kept,) = method.choose([layer], 4)
    assert kept.counts.tolist() == [5, 3]
    assert kept.positions.tolist() == [5, 0, 1, 2, 4, 5, 0, 1]
    # at 1 every head keeps what is forced; at 3 there are 2 * (3 - 2) shared places, at 4 the own order's first is sure as well
    assert kept.admit.tolist() == [1, 1, 3, 3, 4, 1, 1, 4]


@pytest.fixture(scope="module")
def known():
    model = tiny.model("llama")
    seam = Seam.of(model.tokenizer, name=model.id)
    document = torch.randint(3, 590, (130,), generator=torch.Generator().manual_seed(3)).tolist()
    return model, seam, [*seam.head_ids, *document]


def recipe_of(head: int, name: str) -> Recipe:
    return next(one for own in groups(head).values() for one in own if one.name == name)


def masks(model, seam, ids, budgets, chunk, name="stream 0.27"):
    """What the study's recipe and what a prefill keeps, bool [layers, kv_heads, n] each, at every budget."""
    recipe = recipe_of(len(seam.head_ids), name)
    statistics = sorted(name for _, name in recipe.wanted)
    (reading,) = read_documents(model, seam, [ids], {"replay": Observer(chunk=chunk)}, {"replay": statistics})
    ranking = recipe.ranking(reading.seen, reading.told, Text.of(model.tokenizer, ids, CPU))
    observation = plan_replays(seam, ids, len(seam.head_ids), chunk)
    words = Words.of(model.tokenizer, ids, CPU)
    for budget in budgets:
        want = ranking.keep(budget)
        kept = kept_count(budget, len(ids), 8)
        method = RECIPES[name].under_replay(len(seam.head_ids))
        got = prefill(model, ids, observation, method, kept, slice_tokens=50, words=words)
        mask = torch.zeros_like(want)
        for layer, entries in enumerate(got.layers):
            heads = torch.repeat_interleave(torch.arange(want.shape[1]), entries.offsets.diff())
            mask[layer][heads, entries.positions.long()] = True
        yield want, mask


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_kept_is_the_studys(known, name):
    for want, mask in masks(*known, [0.1, 0.2, 0.3], 40, name):
        assert torch.equal(mask, want) and 0 < int(want.sum()) < want.numel()


@pytest.mark.parametrize("name", ["stream 0.27", "two told, 30 % by step/sum"])
def test_what_is_kept_of_a_real_text_is_the_studys(smollm2, name):
    seam = Seam.of(smollm2.tokenizer, name=smollm2.id)
    text = (Path(__file__).parents[2] / "examples" / "observatory.md").read_text(encoding="utf-8")
    ids = [*seam.head_ids, *seam.document_ids(text)[:260]]
    for want, mask in masks(smollm2, seam, ids, [0.1, 0.25], 128, name):
        assert torch.equal(mask, want)


@pytest.mark.parametrize(("name", "readings"), [("auto-twice", 2), ("auto-told", 3)])
def test_what_tokens_stand_for_in_the_model_is_read_first(known, name, readings):
    """Several readings keep what choosing from all layers at once keeps; progress counts all."""
    model, seam, ids = known
    method = get(name)
    observation = plan_replays(seam, ids, len(seam.head_ids), 40)
    steps: list[tuple[int, int]] = []
    got = prefill(model, ids, observation, method, 30, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 3 * readings) for done in range(1, 3 * readings + 1)]
    collected = Collector([method], model.geometry)
    read(model, ids, observation, collected)
    chosen = method.choose([scores[0] for scores in collected.scores], 30)
    for kept, entries in zip(chosen, got.layers, strict=True):
        assert torch.equal(kept.positions.int(), entries.positions) and torch.equal(kept.admit.int(), entries.admit)
    with pytest.raises(ValueError, match="whole model"):
        Orders(method.together, None, None)


def test_a_file_says_what_it_was_made_with(known, tmp_path):
    model, _, _ = known
    text = "The ledger of 1893 names 52 ships and 4711 crates. " * 8
    dropkv.compress(text, model=model, method="auto", budget=0.5, fidelity=False, alpha=0.4).save(tmp_path / "a.kv")
    metadata = read_header(tmp_path / "a.kv").metadata
    assert metadata.method["together"] == {"heads": 0.27, "balance": 1.0, "scope": "so far"}
    assert metadata.method["pool"] == {"kind": "avg", "size": 11}
    assert (metadata.budget.rule, metadata.budget.alpha, metadata.budget.nested) == ("two orders", 0.4, True)
    assert (metadata.budget.forced_first, metadata.budget.forced_last) == (4, 4)


def test_the_default_says_so_and_wants_replays(known, tmp_path):
    model, _, _ = known
    text = "The ledger of 1893 names 52 ships and 4711 crates. " * 8
    made = dropkv.compress(text, model=model, budget=0.5, fidelity=True)
    made.save(tmp_path / "a.kv")
    metadata = read_header(tmp_path / "a.kv").metadata
    assert metadata.method["name"] == "auto"
    assert metadata.method["together"] == {"heads": 0.27, "balance": 1.0, "scope": "so far"}
    assert (metadata.budget.rule, metadata.budget.alpha, metadata.budget.nested) == ("two orders", 0.3, True)
    assert made.report.prefill_seconds > 0 and made.report.score_seconds > 0
    with pytest.raises(
        UsageError, match="auto observes with replays alone: use --observe replay, or --method adadropkv"
    ):
        dropkv.compress(text, model=model, method="auto", budget=0.5, observe="tail")
