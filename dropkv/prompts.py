"""The prompt seam: the document is the head of the model's own chat template, questions and answers its continuation.

Pieces are tokenised apart, so that document ids are computed once and stored, and what looks like a special token
inside a document or question stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dropkv.digests import digest_json
from dropkv.errors import DocumentError, ModelError, QuestionError, UsageError, no_text
from dropkv.template import PLAIN, Pieces, Template, default_arguments, template_source
from dropkv.tokens import PieceEncoder


@dataclass(frozen=True)
class Seam:
    """How a model's prompts are put together; make it with `Seam.of`.

    head_ids: tokens before the document. fingerprint: 32 hexadecimal digits of all that the template writes. arguments:
    what the template was given, JSON values. turn_end_ids: special tokens by which the template ends an answer.
    """

    head_ids: tuple[int, ...]
    fingerprint: str
    arguments: dict[str, Any]
    system: str | None
    turn_end_ids: frozenset[int]
    name: str
    pieces: Pieces = field(repr=False)
    encoder: PieceEncoder = field(repr=False)
    after_space: bool = field(repr=False)

    @classmethod
    def of(
        cls, tokenizer: Any, *, system: str | None = None, arguments: dict[str, Any] | None = None, name: str
    ) -> Seam:
        """The seam of a tokenizer's template, rendered here; without a template, plain "Question: ... Answer:" text.

        arguments: None for the defaults, those of a KV file to make its seam again. name: the model's, for messages.
        Raises ModelError when the template does more to the user's text than trim it, or takes no system text and one
        is given; UsageError for a system text with special tokens in it, which would end its own turn.
        """
        encoder = PieceEncoder(tokenizer, name)
        _check_system(system, encoder)
        source = template_source(tokenizer)
        if source is None:
            given = dict(arguments or {})
            pieces = PLAIN
            prefix = encoder.prefix()
            start = system.strip() + "\n\n" if system and system.strip() else ""
        else:
            given = default_arguments(source) if arguments is None else dict(arguments)
            pieces = Template(tokenizer, source, given, system, name).pieces()
            prefix, start = [], pieces.head
        start_ids, after_space = encoder.before_foreign(start)
        ends = encoder.template(pieces.between.lstrip()) if pieces.between else []
        return cls(
            head_ids=(*prefix, *start_ids),
            fingerprint=digest_json(
                [prefix, start, pieces.opening, pieces.after, pieces.between, pieces.last, sorted(given.items())]
            ),
            arguments=given,
            system=system,
            turn_end_ids=frozenset(ends[:1]) & encoder.special_ids,
            name=name,
            pieces=pieces,
            encoder=encoder,
            after_space=after_space,
        )

    def document_ids(self, text: str) -> list[int]:
        """Token ids of a document, without the head; outer white space is dropped. Raises DocumentError when nothing is
        left.
        """
        text = text.strip()
        if not text:
            raise DocumentError("the document is empty; give one with text in it")
        return self.encoder.foreign(text, after_space=self.after_space)

    def question_ids(self, text: str) -> list[int]:
        """Token ids of what follows the document: the question, and the template up to where the answer begins."""
        opening = self.pieces.opening
        ids = self.encoder.foreign(opening + check_question(text))
        self._refuse_nothing(ids, self.encoder.foreign(opening))
        return ids + self.encoder.template(self.pieces.after)

    def follow_up_ids(self, text: str) -> list[int]:
        """Token ids of what follows an answer's last content token: end of its turn, the next question, up to where its
        answer begins.

        Raises ModelError when the template has no place for a second question.
        """
        between, last = self.pieces.between, self.pieces.last
        if between is None or last is None:
            raise ModelError(
                f"{self.name}: its chat template has no place for a second question; ask each question for itself"
            )
        before, after_space = self.encoder.before_foreign(between)
        ids = self.encoder.foreign(check_question(text), after_space=after_space)
        self._refuse_nothing(ids, [])
        return before + ids + self.encoder.template(last)

    def answer_ids(self, text: str) -> list[int]:
        """Token ids of an answer that was given before, of which only the text is known: as the model would have written it.

        They may differ from those the model chose, since one text can be spelled in several ways.
        """
        text = text.replace("\r\n", "\n").strip()
        if not text:
            return []
        if self.encoder.adds_space and self.pieces.space == " ":
            return self.encoder.foreign(text, after_space=True)
        return self.encoder.foreign(self.pieces.space + text)

    def _refuse_nothing(self, ids: list[int], without: list[int]) -> None:
        """A tokenizer may drop characters, such as control characters: what is left of the question must be one."""
        if ids == without:
            raise QuestionError(f"the tokenizer of {self.name} makes no tokens of the question; ask in words")


def _check_system(system: str | None, encoder: PieceEncoder) -> None:
    """System texts are part of what the template writes, where marks are recognised."""
    if not system:
        return
    try:
        system.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the system text is no valid UTF-8: check the encoding it was read with") from None
    marks = (encoder.special_ids - set(encoder.foreign(system))).intersection(encoder.template(system))
    if marks:
        mark = encoder.tokenizer.convert_ids_to_tokens(min(marks))
        raise UsageError(f"the system text holds {mark}, a special token of {encoder.name}: leave it out")


def question_list(questions: Iterable[str]) -> list[str]:
    """Several questions, each one that can be asked as far as that can be told without a model. Raises QuestionError."""
    if isinstance(questions, bytes | bytearray | Mapping) or not isinstance(questions, Iterable):
        raise QuestionError(f"the question is {no_text(questions)}")
    asked = list(questions)
    if not asked:
        raise QuestionError("the list of questions is empty: give at least one")
    for number, question in enumerate(asked, 1):
        try:
            check_question(question)
        except QuestionError as error:
            raise QuestionError(f"question {number}: {error}") from None
    return asked


def check_question(text: str) -> str:
    """A question as it is asked: outer white space dropped, lines ended by LF.

    Raises QuestionError for an empty one, invalid UTF-8, and what is no text.
    """
    if not isinstance(text, str):
        raise QuestionError(f"the question is {no_text(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise QuestionError("the question is no valid UTF-8; check the terminal's or the file's encoding") from None
    question = text.replace("\r\n", "\n").strip()
    if not question:
        raise QuestionError("the question is empty; ask in words")
    return question
