"""Every family that is served: the plain model at budget 1.0, a float64 reference that keeps everything below it, and a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dropkv.budgets import select
from dropkv.cache import Prefix, Tail
from dropkv.compression import compress_document
from dropkv.documents import Document
from dropkv.generate import Session
from dropkv.library import open_file
from dropkv.methods import get
from dropkv.models import Model
from dropkv.observers import Observation
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill
from dropkv.prompts import Seam
from dropkv.settings import CompressSettings
from tests import tiny
from tests.dropkv.reference import odds_scores, record, tail_scores

N = 90
KEPT = 30
LOGITS = 2e-4  # float32 rounding of random networks whose logits have a spread of about 1
TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, the ship is Evergreen. " * 6


def ids(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCABULARY - 10, (count,), generator=generator).tolist()


def seam_of(model: Model) -> Seam:
    return Seam.of(model.tokenizer, name=model.id)


def observed(model: Model, document: list[int], observe: str, chunk: int) -> Observation:
    return plan_tail(8, len(document)) if observe == "tail" else plan_replays(seam_of(model), document, 6, chunk)


@pytest.mark.parametrize("method", ["dropkv", "adadropkv"])
@pytest.mark.parametrize("observe", ["tail", "replay"])
@pytest.mark.parametrize("family", tiny.BREADTH)
def test_what_is_kept_equals_the_reference(family: str, observe: str, method: str) -> None:
    """Entries, order, keys, values and scores of every layer; sliding layers keep the last window of entries."""
    model = tiny.model(family, dtype=torch.float64)
    document = ids(N)
    observation = observed(model, document, observe, 32)
    chosen = get(method)
    if observe == "replay":
        chosen = chosen.under_replay(6)
    got = prefill(model, document, observation, chosen, KEPT, slice_tokens=40)
    layers = record(model.network, document, observation)
    assert len(got.layers) == len(layers) == 3
    for geometry, mine, theirs in zip(model.geometry, got.layers, layers, strict=True):
        heads = geometry.kv_heads
        if geometry.kind == "sliding":
            line = torch.arange(N - 1, N - 1 - tiny.WINDOW, -1)
            counts, positions = torch.full((heads,), tiny.WINDOW), line.repeat(heads)
            admit, raw = torch.arange(1, tiny.WINDOW + 1).repeat(heads), torch.zeros(heads, N)
        else:
            tail = observe == "tail"
            found = (
                tail_scores(theirs, N, 8, heads, chosen.power) if tail else odds_scores(theirs, N, observation, heads)
            )
            raw = found.float()
            want = select(
                chosen.pooled(raw), KEPT, forced=chosen.forced(N), rule=chosen.rule, alpha=chosen.alpha, unpooled=raw
            )
            counts, positions, admit = want.counts, want.positions, want.admit
        assert mine.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
        assert mine.positions.tolist() == positions.tolist()
        assert mine.admit.tolist() == admit.tolist()
        head = torch.repeat_interleave(torch.arange(heads), counts)
        for part, name in ((mine.keys, "k"), (mine.values, "v")):
            assert float((part - theirs[name][head, positions]).abs().max()) < 2e-6
        assert torch.allclose(mine.scores, raw[head, positions], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("family", tiny.BREADTH)
def test_budget_one_gives_the_logits_of_the_plain_model(family: str) -> None:
    """Question tokens one by one and at once, float32, against transformers' eager attention over the whole text."""
    model = tiny.model(family)
    network = model.network
    document, question = ids(N), ids(tiny.WINDOW + 7, seed=2)  # longer than the sliding layers' window
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        want = network(input_ids=torch.tensor([document + question]), use_cache=False).logits[0]
    network.set_attn_implementation("dropkv")
    assert float(want.std()) > 0.1
    for observe in ("tail", "replay"):
        got = prefill(model, document, observed(model, document, observe, 32), get("full"), N, slice_tokens=40)
        session = Session(model, seam_of(model), Prefix(got.layers, model.geometry, N))
        assert float((session.forward(question, Tail()) - want[-1]).abs().max()) < LOGITS
        tail = Tail()
        for offset, token in enumerate(question):
            assert float((session.forward([token], tail) - want[N + offset]).abs().max()) < LOGITS


@pytest.mark.parametrize("family", tiny.BREADTH)
def test_a_file_holds_what_was_kept(family: str, tmp_path: Path) -> None:
    """Saved, read and asked, against asked at once: the same logits to the last bit."""
    model = tiny.model(family)
    compressed = compress_document(model, Document.of(TEXT), CompressSettings(budget=0.5, chunk=100))
    path = tmp_path / "text.kv"
    compressed.save(path)
    opened = open_file(path).with_model(model)
    kinds = [(layer.kind, layer.window) for layer in opened.metadata.layers]
    assert kinds == [(layer.kind, layer.window) for layer in model.geometry]
    before, after = compressed.session(), opened.session
    assert after.prefix.bounds == before.prefix.bounds and after.prefix.n == before.prefix.n
    question = before.seam.question_ids("What is the code?")
    assert torch.equal(after.forward(question, Tail()), before.forward(question, Tail()))
