"""RoPE whose frequencies depend on the length of the text: one regime from document to answer, or a line that says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dropkv.cache import Tail
from dropkv.compression import compress_document, plan
from dropkv.documents import Document
from dropkv.errors import DocumentError, IdentityError, QuestionError
from dropkv.library import open_file
from dropkv.methods import get
from dropkv.models import Model
from dropkv.observers import Observation
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import prefill, read
from dropkv.prompts import Seam
from dropkv.rope import Regime, regime_of, rope_types
from dropkv.settings import CompressSettings, Sampling
from dropkv_cli.info import _rope
from tests import tiny

N = 90
TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, the ship is Evergreen. "


def ids(count: int) -> list[int]:
    return torch.randint(3, 590, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def seam_of(model: Model) -> Seam:
    return Seam.of(model.tokenizer, name=model.id)


def phi(original: int, **factors: float) -> Model:
    return tiny.model("phi3", partial_rotary_factor=0.75, **tiny.longrope(original, **factors))


def test_regimes() -> None:
    plain = {"rope_type": "yarn", "factor": 4.0}
    assert regime_of(plain, 512, 100) == Regime(0, 512, False) == regime_of({}, 512, 9999)
    assert regime_of({"rope_type": "dynamic", "factor": 2.0}, 512, 100) == Regime(0, 512, True)
    long = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    assert [regime_of(long, 512, n) for n in (1, 128)] == [Regime(0, 128, True)] * 2
    assert [regime_of(long, 512, n) for n in (129, 512, 600)] == [Regime(128, 512, True)] * 3
    assert regime_of(long, 128, 600) == Regime(0, 128, True)
    nested = {"full_attention": long, "sliding_attention": {"rope_type": "default"}}
    assert rope_types(nested) == ["default", "longrope"] and regime_of(nested, 512, 200) == Regime(128, 512, True)
    assert Regime(0, 512, False).described(plain) == plain
    assert Regime(128, 512, True).described({"a": 1}) == {"a": 1, "regime": {"over": 128, "up_to": 512}}


@pytest.mark.parametrize("method", ["adadropkv", "expected-attention", "h2o", "kvzip"])
def test_long_texts_are_rotated_as_if_there_were_long_frequencies_alone(method: str) -> None:
    """Also where a method turns queries back and forth itself, slice by slice and beyond the document."""
    document = ids(N)
    found = []
    for model in (phi(64, short=1.0), phi(64, short=3.0)):
        observation = plan_replays(seam_of(model), document, 6, 32) if method == "kvzip" else plan_tail(8, N)
        chosen = get(method).under_replay(6) if method == "kvzip" else get(method)
        found.append(prefill(model, document, observation, chosen, 30, slice_tokens=25).layers)
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine.positions, theirs.positions) and torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.scores, theirs.scores)


def test_queries_to_come_are_expected_inside_the_regime() -> None:
    """Behind the document the short frequencies end: what is expected there must not be turned by the long ones."""
    document, found = ids(N), []
    for model in (phi(128, long=3.0), phi(128, long=9.0)):
        found.append(prefill(model, document, plan_tail(8, N), get("expected-attention"), 30).layers)
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine.scores, theirs.scores) and torch.equal(mine.keys, theirs.keys)


def test_a_document_too_near_the_limit(tiny_llama: Model) -> None:
    """Its replays would cross; the line says what to do, and cutting it helps, as does a longer document."""
    model = phi(200)
    document = Document.of(TEXT * 6, "near.txt")
    settings = CompressSettings(budget=0.5, chunk=64)
    tokens = plan(tiny_llama, document, settings).tokens
    assert 120 < tokens <= 200
    with pytest.raises(DocumentError) as caught:
        plan(model, document, settings)
    line = str(caught.value)
    assert f"near.txt: {tokens} tokens, and the RoPE of tiny-phi3 changes behind 200 and replay takes" in line
    assert "(documents of more than 200 fit as well), use --truncate, a smaller --chunk" in line and "\n" not in line
    assert plan(model, document, replace(settings, observe="tail", method=None)).tokens == tokens <= 200 - 25
    cut = plan(model, document, replace(settings, truncate=True))
    assert cut.tokens + cut.observation.longest_probe == 200 and cut.truncated_from == tokens
    longer = plan(model, Document.of(TEXT * 12), settings)
    assert longer.tokens > 200 and longer.truncated_from is None


def test_readers_of_their_own_are_told_too() -> None:
    model = phi(100)
    with pytest.raises(DocumentError, match="do not fit into the 100 positions that tiny-phi3 has for them"):
        read(model, ids(N), plan_replays(seam_of(model), ids(N), 6, 32), None)  # type: ignore[arg-type]
    assert isinstance(plan_tail(8, N), Observation)


def test_questions_and_answers_stay_in_the_regime(tmp_path: Path) -> None:
    model = phi(200)
    compressed = compress_document(model, Document.of(TEXT * 3), CompressSettings(budget=1.0, observe="tail"))
    n = compressed.report.document_tokens
    assert compressed.metadata.rope["regime"] == {"over": 0, "up_to": 200}
    session = compressed.session()
    question = session.seam.question_ids("What is the code?")
    answer = session.ask("What is the code?", Sampling(max_new_tokens=400))
    assert answer.generated_tokens == 200 - n - len(question) and not answer.stopped
    with pytest.raises(QuestionError, match=rf"RoPE changes behind 200 .*ask at most {200 - n - 1} tokens"):
        session.ask("What is the code? " * 40)
    with pytest.raises(QuestionError, match="RoPE changes behind 200"):
        session.forward(ids(200 - n + 1), Tail())
    chat = session.chat()
    with pytest.raises(QuestionError, match="RoPE changes behind 200"):
        for _ in range(9):
            chat.ask("What is the code?", Sampling(max_new_tokens=8))
    path = tmp_path / "text.kv"
    compressed.save(path)
    assert open_file(path).with_model(model).ask("What is the code?", Sampling(max_new_tokens=400)).text == answer.text


def test_the_regime_is_in_the_file_and_checked(tmp_path: Path) -> None:
    """A model of another limit is another model, although its weights are the same."""
    model = phi(200)
    path = tmp_path / "text.kv"
    compress_document(model, Document.of(TEXT * 12), CompressSettings(budget=0.5, observe="tail")).save(path)
    opened = open_file(path)
    shown = _rope(opened.header.metadata.rope)
    assert shown.startswith("longrope, ") and shown.endswith(", for texts of 201 to 512 tokens")
    assert opened.header.metadata.rope["regime"] == {"over": 200, "up_to": 512}
    assert opened.header.metadata.rope["rope_type"] == "longrope"
    opened.with_model(model)
    other = replace(model, max_positions=400)
    with pytest.raises(IdentityError, match=r'another RoPE regime: \{"over": 200, "up_to": 512\} in the file'):
        opened.with_model(other)
    with pytest.raises(IdentityError, match=r"\(rope\): .*_embeddings\": 200\} in the file, .*: 300\} in"):
        opened.with_model(phi(300))


def test_a_regime_in_a_file_may_hold_anything() -> None:
    """The object is of free form, so what is shown must not depend on it."""
    for regime in (None, 3, [], {}, {"over": "x", "up_to": 3}, {"over": 1}):
        assert _rope({"rope_type": "default", "regime": regime}) == "default"


def test_dynamic_ntk_ends_where_it_would_begin_to_stretch() -> None:
    model = tiny.model("llama-dynamic", max_position_embeddings=128)
    document = Document.of(TEXT * 6, "long.txt")
    with pytest.raises(DocumentError, match=r"long.txt: \d+ tokens, tiny-llama-dynamic has 128 positions"):
        plan(model, document, CompressSettings(budget=0.5, observe="tail"))
    compressed = compress_document(model, Document.of(TEXT * 2), CompressSettings(budget=1.0, observe="tail"))
    assert compressed.metadata.rope["regime"] == {"over": 0, "up_to": 128}
    # A longer text that ran through the network elsewhere leaves stretched frequencies behind; they are not used.
    with torch.no_grad():
        model.network.set_attn_implementation("eager")
        model.network(input_ids=torch.tensor([ids(200)]), use_cache=False)
        model.network.set_attn_implementation("dropkv")
    again = compress_document(model, Document.of(TEXT * 2), CompressSettings(budget=1.0, observe="tail"))
    for mine, theirs in zip(again.session().prefix.layers, compressed.session().prefix.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
