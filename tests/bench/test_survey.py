"""One prefill for all: the survey's kept sets are those of each method's own compression, at every budget."""

from __future__ import annotations

import pytest
import torch

from dropkv import methods
from dropkv.bench.cells import cells_of
from dropkv.bench.masks import mask_of
from dropkv.bench.plan import AccuracyPlan, make_plan
from dropkv.bench.survey import Collector, Survey, survey
from dropkv.budgets import kept_count
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill, read_together
from dropkv.prompts import Seam
from dropkv.words import Words
from tests import tiny

N, HEAD, CHUNK = 130, 6, 50
BUDGETS = (0.15, 0.4, 1.0)
OBSERVED = [name for name in methods.names() if name != "full"]


def document() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, tiny.VOCABULARY - 10, (N,), generator=generator).tolist()


def other() -> list[int]:
    return list(reversed(document()))


@pytest.fixture(scope="module")
def surveyed() -> tuple[Survey, object]:
    model = tiny.model("llama")
    seam = Seam.of(model.tokenizer, name=model.id)
    pairs = [(observer, name) for observer in ("tail", "replay") for name in OBSERVED]
    pairs = [pair for pair in pairs if pair[0] == "replay" or "replay" not in methods.get(pair[1]).needs]
    both = [other(), document()]  # read together, yet each is what it is alone
    return survey(model, seam, both, pairs, head_tokens=HEAD, chunk=CHUNK, window=8, seeds=[5, 0])[1], model


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", OBSERVED)
@pytest.mark.parametrize("observer", ["tail", "replay"])
def test_masks_are_what_a_compression_keeps(surveyed, observer, name, budget):
    result, model = surveyed
    method = methods.get(name)
    if observer == "tail" and "replay" in method.needs:
        return
    seam = Seam.of(model.tokenizer, name=model.id)
    observation = plan_tail(8, N)
    if observer == "replay":
        method, observation = method.under_replay(HEAD), plan_replays(seam, document(), HEAD, CHUNK)
    kept = kept_count(budget, N, len(method.forced(N)))
    own = prefill(
        model, document(), observation, method, kept, words=Words.of(model.tokenizer, document(), model.device)
    )
    want = torch.zeros(3, 2, N, dtype=torch.bool)
    for layer, entries in enumerate(own.layers):
        heads = torch.repeat_interleave(torch.arange(2), entries.offsets.diff())
        want[layer][heads, entries.positions.long()] = True
    assert torch.equal(result.keep(observer, name, budget), want)


def test_masks_hold_with_ties():
    """Scores of few values, forced entries, every rule: the same sets as choosing layer by layer."""
    from dropkv.bench.masks import Masks
    from dropkv.methods._layer import LayerScores

    generator = torch.Generator().manual_seed(1)
    for name in ("dropkv", "adadropkv", "pyramidkv", "kvzip"):
        method = methods.get(name)
        layers = [LayerScores(torch.randint(4, (3, 60), generator=generator).float()) for _ in range(4)]
        for budget in (0.15, 0.3, 0.7):
            want = mask_of(method.choose(layers, budget), (4, 3, 60), torch.device("cpu"))
            assert torch.equal(Masks(method, layers).keep(budget), want), (name, budget)


def test_one_value_may_stand_for_a_list():
    plan = make_plan(tasks="all-needle", lengths=1024, budgets=[0.1])
    assert plan.tasks == ("noise", "prose", "four-keys", "four-values", "four-queries")
    assert plan.lengths == (1024,) and plan.budgets == (0.1,)


def test_all_methods_are_every_method_and_the_controls():
    plan = make_plan(methods=["dropkv", "all"])
    assert plan.methods[0] == "dropkv" and len(plan.methods) == len(set(plan.methods))
    assert set(plan.methods) == {*methods.names(), "full", "random", "no-document", "random-answer"}


def test_cells_ask_no_control_twice():
    plan = AccuracyPlan(methods=("dropkv", "keydiff", "kvzip", "full", "no-document"), budgets=(0.1, 0.5))
    cells = cells_of(plan, "question-free")
    assert len(cells) == len(set(cells))
    assert [cell.budget for cell in cells if cell.method == "full"] == [1.0]
    assert {cell.observer for cell in cells if cell.method == "dropkv"} == {"replay", "tail"}
    assert {cell.observer for cell in cells if cell.method == "keydiff"} == {"none"}
    assert {cell.observer for cell in cells if cell.method == "kvzip"} == {"replay"}
    aware = cells_of(plan, "question-aware")
    assert {cell.observer for cell in aware if cell.method == "dropkv"} == {"question"}
    assert not [cell for cell in aware if cell.method == "kvzip"]  # it observes with replays alone


def test_replays_of_one_shape_are_scored_together():
    """As on a GPU, where the probes of several documents go through a layer at once: the same scores as one probe after another."""
    model = tiny.model("llama")
    seam = Seam.of(model.tokenizer, name=model.id)
    both = [document(), other()]
    found = []
    for together in (False, True):
        chosen = [methods.get(name).under_replay(HEAD) for name in OBSERVED]
        collector = Collector(chosen, model.geometry)
        observations = [plan_replays(seam, one, HEAD, 40) for one in both]
        read_together(model, both, observations, collector, seeds=[5, 0], slice_tokens=4096, fused=together)
        found.append(collector.scores)
    for alone, joined in zip(*found, strict=True):
        for name, one, other_one in zip(OBSERVED, alone, joined, strict=True):
            torch.testing.assert_close(one.raw, other_one.raw, rtol=1e-5, atol=1e-7, msg=name)
            if one.beside is not None:
                torch.testing.assert_close(one.beside, other_one.beside, rtol=1e-5, atol=1e-6)
