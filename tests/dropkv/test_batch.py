"""Many questions at once: the answers each gets alone, in order, whatever else is in the batch; rows over several documents; nothing grows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dropkv
from dropkv import generate
from dropkv.cache import Tail
from dropkv.decode import batch as batches
from dropkv.decode.batch import Asked, Batch, Row, answer_all, fitting_rows, run_batch
from dropkv.decode.rows import Piece, forward_rows
from dropkv.decode.sampling import Chooser, choose, draws
from dropkv.decode.tails import Tails, row_bytes
from dropkv.errors import QuestionError, UsageError
from dropkv.generate import Session
from dropkv.settings import Sampling
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
OTHER = "A lighthouse stands on the cliff, and its lamp was dark for twenty minutes. Who put it out? " * 3
QUESTIONS = [
    f"Who kept the ledger {word}?" for word in ("today", "at", "night", "and", "why", "was", "the", "code", "a", "ship")
] + ["x", "What is the name of the ship? " * 4]
SHORT = Sampling(max_new_tokens=10)
FAMILIES = [
    "llama",
    "llama-dynamic",
    "mistral-sliding",
    "qwen2-sliding",
    "gemma2",
    "gemma3",
    "smollm3",
    "stablelm",
    "mixtral",
]


def session_of(family: str, text: str = TEXT, **changes: object) -> Session:
    model = tiny.model(family, **changes)
    return dropkv.compress(text, model=model, budget=0.5, chunk=40, fidelity=False, method="adadropkv").session()


@pytest.fixture(scope="module")
def llama() -> Session:
    return session_of("llama")


def texts(session: Session, sampling: Sampling, batch_size: int | None) -> list[str]:
    return [answer.text for answer in session.ask_many(QUESTIONS, sampling, batch_size=batch_size)]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_each_question_alone(family: str) -> None:
    session = session_of(family)
    alone = [session.ask(question, SHORT).text for question in QUESTIONS]
    assert len(set(alone)) > 3
    for size in (1, 3, 64, None):
        assert texts(session, SHORT, size) == alone


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2"])
def test_rows_of_several_documents_in_float64(family: str) -> None:
    """Logits of packed questions, and of steps of rows of different lengths, equal those of a row alone; one long question among them."""
    first = session_of(family, dtype=torch.float64)
    second = Session(first.model, first.seam, session_of(family, OTHER, dtype=torch.float64).prefix)
    nothing = Session(first.model, first.seam, first.prefix.emptied())
    sessions = [first, second, nothing, first, second]
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 500, (count,), generator=generator).tolist() for count in (4, 1, 70, 33, 6)]
    tails = Tails.of(first.model.geometry, first.model.devices, torch.float64, len(ids), 128)
    mine = [Tail() for _ in ids]
    pieces = [Piece(row, one.prefix, 0, tokens) for row, (one, tokens) in enumerate(zip(sessions, ids, strict=True))]
    for step in range(4):
        got = forward_rows(first.model, tails, pieces)
        want = [one.forward(piece.ids, tail) for one, piece, tail in zip(sessions, pieces, mine, strict=True)]
        torch.testing.assert_close(got, torch.stack(want), atol=1e-6, rtol=1e-6)  # norms and RoPE are float32
        pieces = [Piece(p.row, p.prefix, p.before + len(p.ids), [(7 * p.row + step) % 500 + 3]) for p in pieces]


def test_documents_of_one_model_share_a_batch(llama: Session) -> None:
    other = Session(llama.model, llama.seam, session_of("llama", OTHER).prefix)
    sessions = [llama if number % 2 else other for number in range(len(QUESTIONS))]
    asked = [
        Asked(one.prefix, tuple(one.seam.question_ids(question)), SHORT, 10)
        for one, question in zip(sessions, QUESTIONS, strict=True)
    ]
    rows = sorted(answer_all(llama.model, asked, 4), key=lambda row: row.number)
    got = [llama.text(row.tokens).strip() for row in rows]
    assert got == [one.ask(question, SHORT).text for one, question in zip(sessions, QUESTIONS, strict=True)]


def test_what_cannot_be_asked_is_told_in_its_place(llama: Session) -> None:
    outcomes = list(llama.ask_many(["Who?", "", "why " * 600, "What is the code?"], SHORT))
    assert [type(one).__name__ for one in outcomes] == ["Answer", "QuestionError", "QuestionError", "Answer"]
    assert "empty" in str(outcomes[1]) and "512 positions" in str(outcomes[2])
    assert [outcomes[0].text, outcomes[3].text] == [llama.ask(q, SHORT).text for q in ("Who?", "What is the code?")]
    assert list(llama.ask_many([])) == []
    assert [type(one) for one in llama.ask_many(["", " "])] == [QuestionError, QuestionError]
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(UsageError, match="use --batch-size 1 or more"):
            llama.ask_many(["Who?"], batch_size=wrong)


def test_the_library_refuses_a_list_before_it_answers_any(llama: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    compression = dropkv.compress(TEXT, model=llama.model, budget=0.5, chunk=40, fidelity=False)
    kv = dropkv.library.KVFile(compression.session(), compression.metadata, 0.0)
    assert [answer.question for answer in kv.ask(QUESTIONS[:3], SHORT)] == QUESTIONS[:3]
    monkeypatch.setattr(batches, "forward_rows", None)
    with pytest.raises(QuestionError, match="empty"):
        kv.ask(["Who?", "  "], SHORT)


def test_answers_are_given_as_they_are_ready(llama: Session) -> None:
    """The first is there before the last has been read; what it cost is its own."""
    read: list[int] = []
    network = llama.model.network
    original = network.model.embed_tokens.forward
    network.model.embed_tokens.forward = lambda ids: read.append(ids.shape[1]) or original(ids)
    try:
        answers = llama.ask_many(QUESTIONS, Sampling(max_new_tokens=3), batch_size=2)
        first = next(answers)
        before = len(read)
        rest = list(answers)
    finally:
        del network.model.embed_tokens.forward
    tokens = [len(llama.seam.question_ids(question)) for question in QUESTIONS]
    assert read[0] == tokens[0] + tokens[1] and before <= 4 < len(read)
    assert [one.prefilled_tokens for one in (first, *rest)] == tokens
    assert all(0 < one.seconds_first_token <= one.seconds_total for one in (first, *rest))
    generated = sum(one.generated_tokens + one.stopped for one in (first, *rest))
    assert sum(read) == sum(tokens) + generated - len(tokens)  # no token is computed for a row that is done


def test_a_free_row_takes_the_next_question_and_nothing_grows(llama: Session) -> None:
    model, prefix = llama.model, llama.prefix
    ids = [llama.seam.question_ids(question) for question in QUESTIONS[:6]]
    limits = [2, 9, 4, 3, 7, 1]
    waiting = [
        Row(number, Asked(prefix, tuple(one), Sampling(max_new_tokens=limit), limit))
        for number, (one, limit) in enumerate(zip(ids, limits, strict=True))
    ]
    batch = Batch(model, 3, 80)
    buffers = [part.data_ptr() for part in (*batch.tails.keys, *batch.tails.values)]
    size = batch.tails.bytes
    assert size == 3 * row_bytes(model.geometry, model.dtype, 80) == 3 * 3 * 2 * 32 * 80 * 4
    done: list[Row] = []
    admitted = []
    while waiting or batch.rows:
        count = min(batch.free, len(waiting))
        batch.admit(waiting[:count])
        admitted.append(count)
        del waiting[:count]
        done += batch.step()
    assert admitted[0] == 3 and sum(admitted) == 6 and max(admitted[1:]) < 3
    assert [part.data_ptr() for part in (*batch.tails.keys, *batch.tails.values)] == buffers
    assert batch.tails.bytes == size and batch.free == 3
    for row in done:
        want = llama.ask(QUESTIONS[row.number], row.asked.sampling)
        assert llama.text(row.tokens).strip() == want.text and row.stopped == want.stopped


def test_rows_follow_the_memory(llama: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    each = row_bytes(llama.model.geometry, llama.model.dtype, 256) + 16 * tiny.VOCABULARY
    for spare, rows in ((None, 64), (0, 1), (2 * each, 1), (10 * each + 8, 5), (1 << 40, 64)):
        monkeypatch.setattr(batches, "spare_memory", lambda device, spare=spare: spare)
        assert fitting_rows(llama.model, 256) == rows
    monkeypatch.setattr(batches, "spare_memory", lambda device: 2 << 20)
    with pytest.raises(UsageError, match=r"17 answers at once may take .* GiB are free: use a smaller --batch-size"):
        next(llama.ask_many(["Who?"] * 17, Sampling(max_new_tokens=200), batch_size=17))
    assert len(list(llama.ask_many(["Who?"] * 17, Sampling(max_new_tokens=2), batch_size=17))) == 17


def test_a_sample_depends_on_its_seed_alone(llama: Session) -> None:
    """Not on the size of the batch, its other rows, or whether they are sampled."""
    hot = Sampling(max_new_tokens=10, temperature=1.3, top_p=0.9, seed=5)
    alone = [llama.ask(question, hot).text for question in QUESTIONS]
    assert len(set(alone)) > 5 and alone != texts(llama, SHORT, 64)
    for size in (1, 3, 64):
        assert texts(llama, hot, size) == alone
    seeds = [Sampling(10, 1.3, 0.9, seed) if seed % 3 else SHORT for seed in range(len(QUESTIONS))]
    asked = [
        Asked(llama.prefix, tuple(llama.seam.question_ids(question)), sampling, 10)
        for question, sampling in zip(QUESTIONS, seeds, strict=True)
    ]
    for row in answer_all(llama.model, asked, 5):
        want = llama.ask(QUESTIONS[row.number], row.asked.sampling).text
        assert llama.text(row.tokens).strip() == want
    assert texts(llama, Sampling(10, 1.3), 64) != texts(llama, Sampling(10, 1.3), 64)  # no seed: another one each time


def test_rows_are_chosen_as_one_row_is() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(40, 97, generator=generator)
    logits[3, 10] = logits[3, 20] = logits[3].max() + 1  # a tie: the smaller id
    temperature = torch.rand(40, generator=generator, dtype=torch.float64).round(decimals=1) * 2
    top_p = torch.rand(40, generator=generator, dtype=torch.float64).clamp(min=0.01)
    drawn = torch.rand(40, generator=generator, dtype=torch.float64)
    temperature[3] = 0
    drawn[5], top_p[5], temperature[5] = 1 - 2**-53, 1.0, 1.0
    got = choose(logits, temperature, top_p, drawn)
    for row in range(40):
        part = slice(row, row + 1)
        assert choose(logits[part], temperature[part], top_p[part], drawn[part]) == got[row]
        if temperature[row] == 0:
            assert got[row] == logits[row].argmax()
            continue
        shares = torch.softmax(logits[row].double() / temperature[row], 0)
        ranked = sorted(range(97), key=lambda one: -float(shares[one]))
        nucleus, total = [], 0.0
        for one in ranked:
            nucleus.append(one)
            total += float(shares[one])
            if total >= top_p[row]:
                break
        goal = float(drawn[row]) * total
        for one in nucleus:
            goal -= float(shares[one])
            if goal < 0:
                break
        assert got[row] == one
    assert got[3] == 10
    assert torch.equal(draws(Sampling(seed=4), 9), draws(Sampling(seed=4), 20)[:9])
    assert Chooser(Sampling())(logits[0]) == int(logits[0].argmax())


@pytest.mark.slow
def test_the_small_model_at_batch_1_and_64() -> None:
    """The questions of the example story, in float32, greedy."""
    model = dropkv.load_model("smollm2-135m", device="cpu")
    examples = Path(__file__).parents[2] / "examples"
    lines = (examples / "observatory-answers.tsv").read_text().splitlines()
    questions = [line.split("\t")[0] for line in lines[1:]]
    text = (examples / "observatory.md").read_text()
    session = dropkv.compress(text, model=model, budget=0.5, observe="tail", fidelity=False).session()
    sampling = Sampling(max_new_tokens=12)
    alone = [answer.text for answer in session.ask_many(questions, sampling, batch_size=1)]
    assert alone == [answer.text for answer in session.ask_many(questions, sampling, batch_size=64)]
    assert alone[0] == session.ask(questions[0], sampling).text


def test_where_kernels_cannot_be_used_the_plain_loop_goes_on(
    llama: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here they are given tensors of the CPU, which they refuse; that is said in one line."""
    captured = pytest.importorskip("dropkv.decode.captured")
    want = [llama.ask(question, SHORT).text for question in QUESTIONS]
    asked = [Asked(llama.prefix, tuple(llama.question_ids(question)), SHORT, 10) for question in QUESTIONS]
    rows = sorted(run_batch(captured.CapturedBatch(llama.model, 3, 128), asked), key=lambda row: row.number)
    assert [llama.text(row.tokens).strip() for row in rows] == want
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("dropkv: decode kernels cannot be used (")
    caplog.clear()
    monkeypatch.setattr(generate, "captures", lambda model: True)
    session = Session(llama.model, llama.seam, llama.prefix)
    assert [session.ask(question, SHORT).text for question in QUESTIONS] == want
    chat, other = session.chat(), llama.chat()
    assert chat.ask(QUESTIONS[0], SHORT).text == want[0] and chat.ask("Why?", SHORT).text == other_turn(other)
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].message


def other_turn(chat: generate.Chat) -> str:
    chat.ask(QUESTIONS[0], SHORT)
    return chat.ask("Why?", SHORT).text
