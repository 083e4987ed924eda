"""Messages as tokens behind a document: the turns a template would write, and the system text that was there from the start."""

from __future__ import annotations

import pytest

import dropkv
from dropkv.generate import Session, Turn
from dropkv.models import Model
from dropkv.prompts import Seam
from dropkv.serve.conversation import asked_of, question_ids
from dropkv.serve.refusals import Refused
from dropkv.serve.requests import ChatRequest, Message
from dropkv.settings import Sampling
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711. " * 3


def session_of(model: Model, system: str | None = None) -> Session:
    return dropkv.compress(TEXT, model=model, budget=0.5, chunk=40, fidelity=False, system=system).session()


def said(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role, text, f"messages[{place}]") for place, (role, text) in enumerate(turns))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def session(tiny_llama: Model) -> Session:
    return session_of(tiny_llama, system="Be brief.")


TURNS = said(("user", " Who? "), ("assistant", "The master.\n"), ("user", "Why?"))


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (tiny.CHATML, "Who?<|im_end|>\n<|im_start|>assistant\nThe master.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        (tiny.INSTRUCTION, "Who? [/INST] The master.<|im_end|>[INST] Why? [/INST]"),
        (None, "Who?\nAnswer: The master.\n\nQuestion: Why?\nAnswer:"),
    ],
)  # fmt: skip
def test_turns_are_written_as_the_template_writes_them(template: str | None, want: str) -> None:
    tokenizer = tiny.tokenizer(template)
    seam = Seam.of(tokenizer, name="tiny")
    ids = [*seam.question_ids("Who?"), *seam.answer_ids("The master."), *seam.follow_up_ids("Why?")]
    assert tokenizer.decode(ids).endswith(want)


def test_answers_get_the_space_that_the_tokenizer_makes_of_itself() -> None:
    seam = Seam.of(tiny.spaced_tokenizer(), name="tiny")
    first, *_ = seam.answer_ids("The master.")
    assert str(seam.encoder.tokenizer.convert_ids_to_tokens(first)).startswith("\u2581T")


def test_turns_follow_each_other(session: Session) -> None:
    seam = session.seam
    want = [*seam.question_ids("Who?"), *seam.answer_ids("The master."), *seam.follow_up_ids("Why?")]
    assert question_ids(session, TURNS) == want
    # a chat that said the same has the same tokens in its tail
    chat = session.chat()
    chat.resume([Turn("Who?", seam.answer_ids("The master."))])
    asked = asked_of(session, ChatRequest("x", TURNS, Sampling(max_new_tokens=5)))
    assert list(asked.ids) == want and asked.limit == 5
    assert chat.ask("Why?", Sampling(max_new_tokens=5)).prefilled_tokens == len(seam.follow_up_ids("Why?")) + 1


def test_special_tokens_of_others_stay_text(session: Session) -> None:
    ids = question_ids(session, said(("user", "a"), ("assistant", "<|im_end|>"), ("user", "b")))
    special = session.seam.encoder.special_ids
    assert sum(one in special for one in ids) == sum(
        one in special for one in question_ids(session, said(("user", "a"), ("assistant", "x"), ("user", "b")))
    )


def test_the_system_text_of_the_file_may_be_repeated(session: Session) -> None:
    want = question_ids(session, said(("user", "Who?")))
    assert question_ids(session, said(("system", " Be brief.\n"), ("user", "Who?"))) == want


@pytest.mark.parametrize(
    ("messages", "place", "word"),
    [
        (said(("system", "Be long."), ("user", "Who?")), "messages[0]", "'Be brief.'"),
        (said(("system", ""), ("user", "Who?")), "messages[0]", "leave the system message out"),
        (said(("system", "Be brief.")), "messages", "to be a question"),
        (said(("user", "Who?"), ("system", "Be brief.")), "messages[1]", "stands first"),
        (said(("assistant", "Me."), ("user", "Who?")), "messages[0]", "take turns"),
        (said(("user", "Who?"), ("user", "Why?")), "messages[1]", "take turns"),
        (said(("user", "Who?"), ("assistant", "Me.")), "messages", "to be a question"),
        (said(("user", " \n")), "messages[0]", "empty"),
        (said(("user", "Who?"), ("assistant", "x"), ("user", "\ud800")), "messages[2]", "UTF-8"),
    ],
)
def test_what_is_no_conversation_over_the_file_is_refused(
    session: Session, messages: tuple[Message, ...], place: str, word: str
) -> None:
    with pytest.raises(Refused) as refused:
        question_ids(session, messages)
    assert refused.value.param == place and word in str(refused.value)


def test_a_file_without_system_text_takes_none(tiny_llama: Model) -> None:
    session = session_of(tiny_llama)
    assert question_ids(session, said(("system", " "), ("user", "Who?")))
    with pytest.raises(Refused, match=r"\(none\)"):
        question_ids(session, said(("system", "Be brief."), ("user", "Who?")))


def test_a_template_of_one_turn_says_so() -> None:
    one = tiny.CHATML.replace("{% for", "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}{% for", 1)
    session = session_of(tiny.model("llama", template=one))
    with pytest.raises(Refused, match="no place for a second question"):
        question_ids(session, TURNS)


def test_what_does_not_fit_is_refused(session: Session) -> None:
    with pytest.raises(Refused) as refused:
        asked_of(session, ChatRequest("x", said(("user", "code " * 600)), Sampling()))
    assert refused.value.code == "context_length_exceeded" and "do not fit behind the document" in str(refused.value)
    asked = asked_of(session, ChatRequest("x", said(("user", "Who?")), Sampling(max_new_tokens=9000)))
    assert session.prefix.n + asked.length == 512
