"""Conversations: what a turn holds, forgetting, saving and going on."""

from __future__ import annotations

import json

import pytest
import torch

import dropkv
from dropkv.errors import IdentityError, QuestionError, UsageError
from dropkv.settings import Sampling
from dropkv.transcripts import read_turns, save_turns
from formats.errors import ExistingFile
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
QUESTIONS = ["Who kept the ledger?", "What is the code?", "What is the name of the ship?"]
SHORT = Sampling(max_new_tokens=9)


@pytest.fixture(scope="module")
def kv(tmp_path_factory):
    path = tmp_path_factory.mktemp("kv") / "a.kv"
    model = tiny.model("llama")
    dropkv.compress(TEXT, model=model, budget=0.5, chunk=40, name="note").save(path)
    return dropkv.load(path, model=model)


def test_turns_are_what_was_asked_and_generated(kv):
    chat = kv.chat()
    answers = [chat.ask(question, SHORT) for question in QUESTIONS]
    assert [turn.question for turn in chat.turns] == QUESTIONS
    for turn, answer in zip(chat.turns, answers, strict=True):
        assert kv.session.text(turn.tokens).strip() == answer.text
        assert (len(turn.tokens), turn.stopped) == (answer.generated_tokens, answer.stopped)


def test_an_abandoned_answer_is_a_turn_as_far_as_it_has_come(kv):
    chat = kv.chat()
    stream = chat.stream(QUESTIONS[0], Sampling(max_new_tokens=100))
    assert chat.turns == []  # nothing is read before the first piece is asked for
    next(stream)
    stream.close()
    (turn,) = chat.turns
    assert 1 <= len(turn.tokens) < 100 and not turn.stopped
    other = kv.chat()
    other.resume(chat.turns)
    other.resume(other.turns)
    assert other.turns == [turn] and other.turns[0] is not turn
    assert other.ask(QUESTIONS[1], SHORT).text == chat.ask(QUESTIONS[1], SHORT).text


def test_a_reset_chat_answers_as_a_new_one(kv):
    chat = kv.chat()
    first = chat.ask(QUESTIONS[0], SHORT)
    chat.ask(QUESTIONS[1], SHORT)
    chat.reset()
    assert chat.turns == []
    again = chat.ask(QUESTIONS[0], SHORT)
    assert (again.text, again.prefilled_tokens) == (first.text, first.prefilled_tokens)


@pytest.mark.parametrize("spoken", [1, 2])
def test_a_saved_chat_goes_on_as_if_it_had_never_ended(kv, tmp_path, spoken):
    chat = kv.chat()
    for question in QUESTIONS[:spoken]:
        chat.ask(question, SHORT)
    path = tmp_path / "talk.jsonl"
    save_turns(path, chat.turns, kv.session, kv.metadata)
    later = kv.chat()
    later.resume(read_turns(path, kv.session, kv.metadata))
    assert later.turns == chat.turns
    here, there = (one.stream(QUESTIONS[2], SHORT).result() for one in (chat, later))
    assert (here.text, here.prefilled_tokens) == (there.text, there.prefilled_tokens)
    # Not only the same choice: the tails hold the same keys and values, to rounding.
    for mine, theirs in zip(chat._tail._keys.values(), later._tail._keys.values(), strict=True):
        torch.testing.assert_close(mine[:, : len(chat._tail)], theirs[:, : len(later._tail)], atol=2e-5, rtol=1e-4)


def test_a_transcript_goes_on_with_another_budget_of_the_same_document(kv, tmp_path):
    chat = kv.chat()
    chat.ask(QUESTIONS[0], SHORT)
    save_turns(tmp_path / "talk.jsonl", chat.turns, kv.session, kv.metadata)
    dropkv.compress(TEXT, model=kv.model, budget=0.9, observe="tail", name="renamed").save(tmp_path / "b.kv")
    other = dropkv.load(tmp_path / "b.kv", model=kv.model)
    assert read_turns(tmp_path / "talk.jsonl", other.session, other.metadata) == chat.turns
    dropkv.compress(TEXT + "More.", model=kv.model, budget=0.5).save(tmp_path / "c.kv")
    stranger = dropkv.load(tmp_path / "c.kv", model=kv.model)
    with pytest.raises(IdentityError, match=r"its document sha256 is [0-9a-f]{64}, that of the .kv file [0-9a-f]{64}"):
        read_turns(tmp_path / "talk.jsonl", stranger.session, stranger.metadata)


def test_markdown_for_readers(kv, tmp_path):
    chat = kv.chat()
    answers = [chat.ask(question, SHORT).text for question in QUESTIONS[:2]]
    path = tmp_path / "talk.md"
    save_turns(path, chat.turns, kv.session, kv.metadata)
    blocks = [f"## {question}\n\n{answer}\n" for question, answer in zip(QUESTIONS, answers, strict=False)]
    head = f"# note\n\ntiny-llama, {kv.metadata.document.tokens} tokens\n"
    assert path.read_text(encoding="utf-8") == "\n".join([head, *blocks])
    with pytest.raises(ExistingFile, match=r"talk.md.* exists"):
        save_turns(path, chat.turns, kv.session, kv.metadata)
    save_turns(path, chat.turns[:1], kv.session, kv.metadata, overwrite=True)
    assert QUESTIONS[1] not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["a.kv", "A.KV", "a.kv.safetensors", "a.json"])
def test_names_of_other_files_are_refused(kv, tmp_path, name):
    chat = kv.chat()
    chat.ask(QUESTIONS[0], SHORT)
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"a conversation is no such file: name it NAME\.jsonl to go on with it"):
        save_turns(tmp_path / name, chat.turns, kv.session, kv.metadata, overwrite=True)
    assert (tmp_path / name).read_bytes() == b"precious"
    save_turns(tmp_path / "B.JSONL", chat.turns, kv.session, kv.metadata)
    assert read_turns(tmp_path / "B.JSONL", kv.session, kv.metadata) == chat.turns


GOOD = {"question": "Who?", "answer": "", "tokens": [5, 6], "stopped": False}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tokens": [5, 600]}, "line 2 has tokens that the model does not know"),
        ({"tokens": [-1]}, "line 2 has tokens"),
        ({"tokens": [True]}, "line 2 has tokens"),
        ({"tokens": "56"}, "line 2 is no turn"),
        ({"question": None}, "line 2 is no turn"),
        ({"stopped": 1}, "line 2 is no turn"),
    ],
)
def test_turns_that_are_none(kv, tmp_path, change, word):
    path = tmp_path / "talk.jsonl"
    save_turns(path, [], kv.session, kv.metadata)
    head = path.read_text(encoding="utf-8")
    path.write_text(head + json.dumps(GOOD) + "\n", encoding="utf-8")
    assert [turn.tokens for turn in read_turns(path, kv.session, kv.metadata)] == [[5, 6]]
    path.write_text(head + json.dumps(GOOD | change) + "\n", encoding="utf-8")
    with pytest.raises(QuestionError, match=word):
        read_turns(path, kv.session, kv.metadata)


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"# note\n", b"[]\n", b"{}\n", b'{"dropkv_chat": 2}\n', b"[" * 100_000]
)
def test_files_that_are_no_transcript(kv, tmp_path, content):
    (tmp_path / "talk.jsonl").write_bytes(content)
    with pytest.raises(QuestionError, match=r"talk.jsonl: is no transcript.*/save"):
        read_turns(tmp_path / "talk.jsonl", kv.session, kv.metadata)


def test_turns_that_do_not_fit_leave_the_chat_alone(kv):
    chat = kv.chat()
    chat.ask(QUESTIONS[0], SHORT)
    before = list(chat.turns)
    long = [type(before[0])("why? " * 200, [5] * 400)]
    with pytest.raises(QuestionError, match="512 positions"):
        chat.resume(long)
    assert chat.turns == before and len(chat._tail) > 0
