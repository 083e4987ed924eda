"""The messages of a request as what follows the document: a question, or turns and then a question."""

from __future__ import annotations

from dropkv.decode.batch import Asked
from dropkv.errors import ModelError, QuestionError
from dropkv.generate import Session
from dropkv.serve.refusals import Refused
from dropkv.serve.requests import ChatRequest, Message
from formats.errors import printable

SHOWN = 60  # letters of a system text in a message


def asked_of(session: Session, request: ChatRequest) -> Asked:
    """The request as tokens behind the session's document. Raises Refused for what cannot be asked of it, or does not fit."""
    ids = question_ids(session, request.messages)
    try:
        limit = session.room(len(ids), request.sampling.max_new_tokens)
    except QuestionError as error:
        raise Refused(str(error), param="messages", code="context_length_exceeded") from None
    return Asked(session.prefix, tuple(ids), request.sampling, limit)


def question_ids(session: Session, messages: tuple[Message, ...]) -> list[int]:
    """Token ids of all messages behind the document, up to where the next answer begins. Raises Refused."""
    turns = list(messages)
    if turns[0].role == "system":
        _check_system(session.seam.system, turns.pop(0))
    for number, message in enumerate(turns):
        if message.role == "system":
            raise Refused(f"{message.place}: a system message stands first, or nowhere", param=message.place)
        if message.role != ("user", "assistant")[number % 2]:
            raise Refused(
                f"{message.place}: after the system message questions (user) and answers (assistant) take turns",
                param=message.place,
            )
    if len(turns) % 2 == 0:
        raise Refused("the last message is to be a question (user): it is what is answered", param="messages")
    ids: list[int] = []
    for number, message in enumerate(turns):
        try:
            if message.role == "assistant":
                ids += session.seam.answer_ids(message.text)
            else:
                ids += (session.seam.follow_up_ids if number else session.seam.question_ids)(message.text)
        except (QuestionError, ModelError) as error:
            raise Refused(f"{message.place}: {error}", param=message.place) from None
    return ids


def _check_system(own: str | None, message: Message) -> None:
    """The system text stands before the document, so it was fixed when that was compressed."""
    if message.text.strip() == (own or "").strip():
        return
    has = f"{printable(own.strip(), SHOWN)!r}" if own and own.strip() else "none"
    raise Refused(
        f"{message.place}: the file's system text was fixed when it was compressed ({has}), and this is another: "
        f"leave the system message out, or compress the document again with --system",
        param=message.place,
        code="system_message_differs",
    )
