"""Answering from a compressed document: the same saved and unsaved, in any order, alone and after others; sampling, streams, chats."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dropkv
from dropkv.cache import Tail
from dropkv.compression import compress_document, estimate
from dropkv.errors import BudgetError, DocumentError, QuestionError, UsageError
from dropkv.generate import Chooser
from dropkv.settings import CompressSettings, Sampling
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
QUESTIONS = ["Who kept the ledger?", "What is the code?", "What is the name of the ship?"]
SHORT = Sampling(max_new_tokens=12)

LOGITS_IN_A_NEW_PROCESS = """
import sys, torch, dropkv
from dropkv.cache import Tail
from tests import tiny
kv = dropkv.load(sys.argv[1], model=tiny.model("llama"))
ids = kv.session.seam.question_ids(sys.argv[2])
torch.save([kv.session.forward(ids, Tail()), kv.ask(sys.argv[2], dropkv.Sampling(max_new_tokens=12)).text], sys.argv[3])
"""


@pytest.fixture(scope="module")
def compression():
    return dropkv.compress(TEXT, model=tiny.model("llama"), budget=0.5, chunk=40)


def test_a_new_process_gives_the_same_logits_bit_for_bit(compression, tmp_path):
    path, out = tmp_path / "a.kv", tmp_path / "logits.pt"
    compression.save(path)
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", LOGITS_IN_A_NEW_PROCESS, path, QUESTIONS[1], out], check=True, cwd=root)
    logits, text = torch.load(out)
    session = compression.session()
    assert torch.equal(session.forward(session.seam.question_ids(QUESTIONS[1]), Tail()), logits)
    assert session.ask(QUESTIONS[1], SHORT).text == text


def test_questions_in_any_order_get_the_answers_each_gets_alone(compression):
    session = compression.session()
    alone = {question: compression.session().ask(question, SHORT).text for question in QUESTIONS}
    assert len(set(alone.values())) > 1
    for order in (QUESTIONS, QUESTIONS[::-1], QUESTIONS * 2):
        assert [session.ask(question, SHORT).text for question in order] == [alone[question] for question in order]


def test_only_the_question_is_computed(compression):
    """Counted where the network runs, not taken from the report."""
    session = compression.session()
    counted = []
    original = session.model.network.model.embed_tokens.forward

    def count(ids):
        counted.append(ids.shape[1])
        return original(ids)

    session.model.network.model.embed_tokens.forward = count
    try:
        answer = session.ask(QUESTIONS[0], SHORT)
    finally:
        del session.model.network.model.embed_tokens.forward
    asked = len(session.seam.question_ids(QUESTIONS[0]))
    assert answer.prefilled_tokens == asked == counted[0]
    assert counted[1:] == [1] * (len(counted) - 1) and len(counted) in (
        answer.generated_tokens,
        answer.generated_tokens + 1,
    )
    assert answer.document_tokens == compression.report.document_tokens
    assert answer.prefix_entries == compression.report.kept


def test_the_library_in_three_lines(tmp_path):
    model = tiny.model("qwen2")
    made = dropkv.compress(TEXT, model=model, budget=0.5, observe="tail", name="note")
    size = made.save(tmp_path / "note.kv")
    kv = dropkv.load(tmp_path / "note.kv", model=model)
    assert size == (tmp_path / "note.kv").stat().st_size
    assert kv.metadata.document.name == "note" and kv.metadata.observer["name"] == "tail"
    answers = kv.ask(QUESTIONS, SHORT)
    assert [answer.text for answer in answers] == [made.session().ask(question, SHORT).text for question in QUESTIONS]
    assert kv.ask(QUESTIONS[0], SHORT).text == answers[0].text
    assert [answer.question for answer in answers] == QUESTIONS


def test_stored_tokens_are_the_document(tmp_path, compression):
    from formats import read_file

    compression.save(tmp_path / "with.kv")
    contents = read_file(tmp_path / "with.kv")
    seam = compression.session().seam
    assert contents.tokens.tolist() == [*seam.head_ids, *seam.document_ids(TEXT)]
    made = dropkv.compress(TEXT, model=tiny.model("llama"), budget=0.5, keep_tokens=False, chunk=40)
    made.save(tmp_path / "without.kv")
    assert read_file(tmp_path / "without.kv").tokens is None


def test_streamed_pieces_make_the_answer(compression):
    stream = compression.session().stream(QUESTIONS[0], SHORT)
    assert stream.answer is None
    pieces = list(stream)
    assert "".join(pieces).strip() == stream.answer.text == compression.session().ask(QUESTIONS[0], SHORT).text


def test_a_chat_sees_its_earlier_turns(compression):
    """The second turn equals one forward call over everything said so far; alone the question gives other logits."""
    session = compression.session()
    chat = session.chat()
    first = chat.ask(QUESTIONS[0], Sampling(max_new_tokens=5))
    seam = session.seam
    tokens = first_tokens(session, QUESTIONS[0], 5)
    assert session.text(tokens).strip() == first.text
    everything = [*seam.question_ids(QUESTIONS[0]), *tokens, *seam.follow_up_ids(QUESTIONS[1])]
    want = session.forward(everything, Tail()).argmax()
    second = chat.ask(QUESTIONS[1], Sampling(max_new_tokens=1))
    assert (
        second.prefilled_tokens == len(seam.follow_up_ids(QUESTIONS[1])) + 1
    )  # the last token of the answer had not been read
    assert session.text([int(want)]).strip() == second.text or int(want) in session.model.stop_ids


def first_tokens(session, question, count):
    """Greedy answer tokens, computed from scratch each time."""
    ids, tokens = session.seam.question_ids(question), []
    for _ in range(count):
        token = int(session.forward([*ids, *tokens], Tail()).argmax())
        if token in session.model.stop_ids:
            break
        tokens.append(token)
    return tokens


def test_sampling_follows_seed_temperature_and_nucleus():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    draws = [int(Chooser(Sampling(temperature=1.0, seed=seed))(logits)) for seed in range(4000)]
    for token, share in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert abs(draws.count(token) / 4000 - share) < 0.03
    nucleus = {int(Chooser(Sampling(temperature=1.0, top_p=0.6, seed=seed))(logits)) for seed in range(200)}
    assert nucleus == {0, 1}
    assert {int(Chooser(Sampling(temperature=1.0, top_p=1e-9, seed=seed))(logits)) for seed in range(50)} == {0}
    assert Chooser(Sampling())(logits) == 0
    one, other = Chooser(Sampling(temperature=1.0, seed=3)), Chooser(Sampling(temperature=1.0, seed=3))
    assert [one(logits) for _ in range(20)] == [other(logits) for _ in range(20)]


def test_what_does_not_fit_is_refused_with_the_limit():
    model = tiny.model("llama", max_position_embeddings=200)
    with pytest.raises(
        DocumentError, match=r"tokens, tiny-llama has 200 positions and replay takes .* at most \d+ fit, use --truncate"
    ):
        dropkv.compress(TEXT * 3, model=model, chunk=60)
    with pytest.raises(DocumentError, match=r"replay takes \d+ of them: no document fits, use a smaller --chunk"):
        dropkv.compress(TEXT * 3, model=model, truncate=True)
    with pytest.raises(DocumentError, match="at most 175 fit with room for a question"):
        dropkv.compress(TEXT * 3, model=model, observe="tail")
    cut = dropkv.compress(TEXT * 3, model=model, observe="tail", truncate=True, budget=0.5)
    assert cut.report.document_tokens == 175
    assert cut.metadata.document.tokens == 175
    assert cut.metadata.document.whole_tokens == cut.report.document_tokens_before_truncation == 286
    assert dropkv.compress("Short.", model=model, budget=1.0).report.document_tokens_before_truncation is None
    with pytest.raises(QuestionError, match="do not fit behind the document's 175"):
        cut.session().ask("Why? " * 60)
    answer = cut.session().ask("Why?", Sampling(max_new_tokens=500))
    assert answer.prefilled_tokens + answer.generated_tokens <= 25


def test_budgets_and_settings_that_cannot_be_meant(tiny_llama):
    for budget in (0, -1, 0.0, -0.5, 1.5, True):
        with pytest.raises(BudgetError, match="use "):
            CompressSettings(budget=budget)
    with pytest.raises(BudgetError, match="fewer than the"):
        dropkv.compress(TEXT, model=tiny_llama, budget=3)
    for wrong in ({"observe": "dream"}, {"window": 0}, {"pool": 4}, {"alpha": 2.0}, {"chunk": 0}):
        with pytest.raises(UsageError):
            CompressSettings(**wrong)
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}):
        with pytest.raises(UsageError):
            Sampling(**wrong)


def test_the_estimate_is_what_comes_out(tiny_llama, tmp_path):
    document = dropkv.Document.of(TEXT, "note")
    settings = CompressSettings(budget=0.4, chunk=40)
    sizes = estimate(tiny_llama, document, settings)
    made = compress_document(tiny_llama, document, settings)
    report = made.report
    assert (sizes.document_tokens, sizes.kept, sizes.kept_entries) == (
        report.document_tokens,
        report.kept,
        report.kept_entries,
    )
    assert (sizes.full_entries, sizes.full_cache_bytes) == (report.full_entries, report.full_cache_bytes)
    assert abs(made.save(tmp_path / "a.kv") - sizes.file_bytes) < 12_000  # the header is not estimated
    assert report.peak_memory_bytes > 10_000_000 and report.prefill_seconds > 0 and report.score_seconds > 0


def test_progress_counts_tokens_in_every_layer(tiny_llama):
    steps = []
    document = dropkv.Document.of(TEXT, "note")
    made = compress_document(
        tiny_llama, document, CompressSettings(chunk=40), progress=lambda *step: steps.append(step)
    )
    n = made.report.document_tokens
    assert steps == [(n, 3 * n), (2 * n, 3 * n), (3 * n, 3 * n)]


def test_head_adaptive_files_are_as_small_as_uniform_ones(tiny_llama, tmp_path):
    """No padding to the longest head: the bytes follow the entries."""
    sizes, spread = [], []
    for method in ("dropkv", "adadropkv"):
        made = dropkv.compress(TEXT, model=tiny_llama, budget=0.4, chunk=40, method=method)
        sizes.append(made.save(tmp_path / f"{method}.kv"))
        bounds = made.session().prefix.bounds
        spread.append(max(b[1] for b in bounds) - min(b[1] for b in bounds))
    assert spread[0] == 0 and spread[1] > 0
    assert abs(sizes[0] - sizes[1]) < 200
