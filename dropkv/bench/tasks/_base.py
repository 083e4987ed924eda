"""What a task is: documents of an exact token length, questions about them, and the rule that scores an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dropkv.bench.tasks._match import match_all
from dropkv.errors import UsageError
from dropkv.tokens import PieceEncoder


@dataclass(frozen=True)
class Question:
    """What is asked behind a document.

    The query is text, what the chat template writes after the user's text, answer_prefix. classes: every label there
    is, for the tasks that choose one.
    """

    text: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One document with its questions. document_ids: without the template's head, so that head and ids together make
    `length` tokens (at most `length` for LongBench). depth: where its needle stands, 0 to 1.
    """

    task: str
    length: int
    index: int
    document_ids: tuple[int, ...]
    questions: tuple[Question, ...]
    depth: float | None = None


@dataclass(frozen=True)
class Made:
    """What a task makes for one sample, before it is numbered."""

    ids: list[int]
    questions: tuple[Question, ...]
    depth: float | None = None


@dataclass(frozen=True)
class Frame:
    """The room a document has to fill, and the tokenizer it is written for."""

    task: str
    length: int
    head_tokens: int
    tokenizer: Any

    @property
    def room(self) -> int:
        """Tokens of the document itself."""
        return self.length - self.head_tokens

    @cached_property
    def _encoder(self) -> PieceEncoder:
        return PieceEncoder(self.tokenizer, str(getattr(self.tokenizer, "name_or_path", "") or "the model"))

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of the document; what looks like a special token stays text."""
        return self._encoder.foreign(text)

    def short(self, needed: int) -> UsageError:
        """The error for a length that `needed` document tokens do not fit into."""
        least = needed + self.head_tokens
        return UsageError(f"{self.task}: {self.length} tokens are too short a length for it; ask for at least {least}")

    def long(self, tokens: int, source: str, fix: str) -> UsageError:
        """The error for a length that `source`, which holds `tokens` tokens, cannot fill."""
        return UsageError(
            f"{self.task}: a length of {self.length} tokens is more than {source} can fill ({tokens} tokens); {fix}"
        )


@dataclass(frozen=True)
class Task(ABC):
    """A task of the bench.

    label: the family a table names ("RULER-shaped", "needle", ...). chat: whether the prompt goes through the chat
    template. exact: whether every document has exactly the length asked; otherwise that is the most it has. grows: whether what follows an
    answer never makes its score less, as where expected strings are looked for.
    """

    name: str
    label: str
    max_new_tokens: int
    chat: bool = True
    exact: bool = True
    grows: bool = True

    def samples(self, tokenizer: Any, length: int, count: int, seed: int = 0, head_tokens: int = 0) -> Iterator[Sample]:
        """Up to `count` samples, the same for the same seed; fewer only where a data file holds fewer.

        length: tokens of head and document. Raises UsageError for a length that the task cannot fill or fit into.
        """
        frame = Frame(self.name, length, head_tokens, tokenizer)
        if count < 1:
            raise UsageError(f"{self.name}: {count} samples are none; ask for at least 1")
        if frame.room < 1:
            raise frame.short(1)
        documents = self._documents(frame, seed)
        for index, made in zip(range(count), documents, strict=False):
            assert len(made.ids) == frame.room if self.exact else len(made.ids) <= frame.room
            yield Sample(self.name, length, index, tuple(made.ids), made.questions, made.depth)

    @abstractmethod
    def _documents(self, frame: Frame, seed: int) -> Iterator[Made]:
        """Documents one after the other, without end where nothing limits them."""

    def score(self, prediction: str, question: Question) -> float:
        """How right an answer is, 0 to 1: the share of the expected strings that it holds, unless a task knows better."""
        return match_all(prediction, question.answers)
