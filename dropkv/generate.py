"""Answering from a compressed document: only the question's own tokens and the answer's are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.answer_text import AnswerText
from dropkv.attention import run_logits
from dropkv.cache import AnswerRun, Prefix, Tail
from dropkv.decode.batch import Asked, Row, answer_all, captures
from dropkv.decode.sampling import Chooser, draws
from dropkv.errors import ModelError, QuestionError
from dropkv.models import Model
from dropkv.prompts import Seam
from dropkv.settings import Sampling, check_batch_size, check_sampling

WORTH_CAPTURING = 8  # tokens; the steps of shorter answers are not captured


@dataclass(frozen=True)
class Answer:
    """One answer and what it cost.

    text: the answer, without white space around it. document_tokens: of the whole document, however few of its entries are kept.
    prefix_entries: kept entries per KV head on average over layers and heads. prefilled_tokens: tokens that were computed before the
    first answer token (the question's own). seconds_first_token, seconds_total: from the question on. stopped: True when the model ended
    the answer itself, False when the token limit or the end of its context did.
    """

    question: str
    text: str
    document_tokens: int
    prefix_entries: int
    prefilled_tokens: int
    generated_tokens: int
    seconds_first_token: float
    seconds_total: float
    stopped: bool


@dataclass
class Turn:
    """One question of a conversation and the tokens of its answer (without one that ends it); stopped: the model ended it itself."""

    question: str
    tokens: list[int]
    stopped: bool = False


class Stream(Iterator[str]):
    """Pieces of one answer's text as they are generated; `answer` is None until the last one was taken."""

    def __init__(
        self,
        session: Session,
        tail: Tail,
        question: str,
        ids: Sequence[int],
        sampling: Sampling,
        pending: list[int],
        turns: list[Turn] | None = None,
    ) -> None:
        self.answer: Answer | None = None
        self._turns = [] if turns is None else turns
        self._alone = turns is None
        self._pieces = self._run(session, tail, question, ids, sampling, pending)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating; the answer stays unset."""
        self._pieces.close()  # type: ignore[attr-defined]

    def result(self) -> Answer:
        """Generate to the end and give the answer. Raises QuestionError when it was stopped before."""
        for _ in self:
            pass
        if self.answer is None:
            raise QuestionError("the answer was stopped before its end and has no result; ask again")
        return self.answer

    def _run(
        self, session: Session, tail: Tail, question: str, ids: Sequence[int], sampling: Sampling, pending: list[int]
    ) -> Iterator[str]:
        started = time.perf_counter()
        limit = session.room(len(tail) + len(ids), sampling.max_new_tokens)
        logits = session.forward(ids, tail)
        pending.clear()  # everything before the answer is in the tail now
        prefilled, first = len(ids), 0.0
        turn = Turn(question, [])
        self._turns.append(turn)  # the tail has the question now, whatever becomes of the answer
        tokens = turn.tokens
        shown = ""
        for token in session.tokens(logits, tail, sampling, limit, pending):
            first = first or time.perf_counter() - started
            if token in session.model.stop_ids:
                turn.stopped = True
                break
            tokens.append(token)
            pending[:] = [token]
            text = session.text(tokens)
            if len(text) > len(shown) and text.startswith(shown):
                yield text[len(shown) :]
                shown = text
            if len(tokens) >= limit:
                break
        text = session.text(tokens)
        if text != shown and text.startswith(shown):
            yield text[len(shown) :]
        if self._alone:
            session.rest(tail)
        self.answer = Answer(
            question,
            text.strip(),
            session.prefix.n,
            session.entries_per_head,
            prefilled,
            len(tokens),
            first,
            time.perf_counter() - started,
            turn.stopped,
        )


class Session:
    """A model, the seam of its template and one compressed document: what questions are asked of. The prefix never changes, so questions in
    any order give the answers each gives alone."""

    def __init__(self, model: Model, seam: Seam, prefix: Prefix) -> None:
        self.model = model
        self.seam = seam
        self.prefix = prefix
        self._text = AnswerText(model.tokenizer, seam.encoder.special_ids)
        self._idle: list[Tail] = []
        self._captures = True

    def rest(self, tail: Tail) -> None:
        """The tail of an answer that is done is kept for the next one, if steps were captured on it."""
        if tail.step is not None:
            tail.length = 0
            self._idle[:] = [tail]

    @property
    def entries_per_head(self) -> int:
        """Kept entries per KV head, averaged over all heads of all layers."""
        return round(self.prefix.entries / sum(geometry.kv_heads for geometry in self.prefix.geometry))

    def question_ids(self, question: str) -> list[int]:
        """Token ids of a question behind the document. Raises QuestionError for an empty one or one that does not fit."""
        ids = self.seam.question_ids(question)
        self.room(len(ids), 1)
        return ids

    def stream(self, question: str, sampling: Sampling | None = None) -> Stream:
        """The answer to one question, piece by piece. Raises QuestionError for an empty question or one that does not fit."""
        ids = self.question_ids(question)
        sampling = check_sampling(sampling)
        return Stream(self, self._idle.pop() if self._idle else Tail(), question, ids, sampling, [])

    def ask(self, question: str, sampling: Sampling | None = None) -> Answer:
        """The whole answer to one question."""
        return self.stream(question, sampling).result()

    def ask_many(
        self, questions: Sequence[str], sampling: Sampling | None = None, *, batch_size: int | None = None
    ) -> Iterator[Answer | QuestionError]:
        """The answers in the order of the questions, each as if asked alone; up to batch_size questions are answered at once over the one prefix.

        batch_size: None for what fits into memory, at most 64; UsageError below 1. A question that is empty or does not fit gives its QuestionError
        and leaves the others alone. An answer's seconds are counted from when its question begins to be read.
        """
        check_batch_size(batch_size)
        return self._answers(questions, sampling or Sampling(), batch_size)

    def _answers(
        self, questions: Sequence[str], sampling: Sampling, batch_size: int | None
    ) -> Iterator[Answer | QuestionError]:
        outcomes: dict[int, Answer | QuestionError] = {}
        asked: list[Asked] = []
        numbers: list[int] = []
        for number, question in enumerate(questions):
            try:
                ids = self.question_ids(question)
                limit = self.room(len(ids), sampling.max_new_tokens)
            except QuestionError as error:
                outcomes[number] = error
            else:
                asked.append(Asked(self.prefix, tuple(ids), sampling, limit))
                numbers.append(number)
        given = 0
        for row in answer_all(self.model, asked, batch_size):
            number = numbers[row.number]
            outcomes[number] = self._answer(questions[number], row)
            while given in outcomes:
                yield outcomes.pop(given)
                given += 1
        for number in sorted(outcomes):
            yield outcomes[number]

    def _answer(self, question: str, row: Row) -> Answer:
        return Answer(
            question,
            self.text(row.tokens).strip(),
            self.prefix.n,
            self.entries_per_head,
            len(row.asked.ids),
            len(row.tokens),
            row.first - row.started,
            row.ended - row.started,
            row.stopped,
        )

    def chat(self) -> Chat:
        """A conversation over the document: each turn sees the turns before it."""
        return Chat(self)

    def room(self, used: int, wanted: int) -> int:
        """New tokens that fit behind the document and `used` further tokens, at most `wanted`; QuestionError when none do."""
        up_to = self.model.regime(self.prefix.n).up_to
        free = up_to - self.prefix.n - used
        if free < 1:
            why = (
                f"the model has {up_to} positions"
                if up_to == self.model.max_positions
                else f"the model's RoPE changes behind {up_to} and would turn the document's keys anew"
            )
            raise QuestionError(
                f"{used} tokens do not fit behind the document's {self.prefix.n}: {why}, "
                f"ask at most {max(0, up_to - self.prefix.n - 1)} tokens"
            )
        return min(free, wanted)

    def forward(self, ids: Sequence[int], tail: Tail) -> Tensor:
        """Logits [vocabulary] after the last of `ids`, which are appended to the tail. float32 (float64 for a float64 model).

        Raises QuestionError when they would leave the document's RoPE regime.
        """
        self.room(len(tail) + len(ids) - 1, 1)
        run = AnswerRun(self.prefix, tail)
        start = self.prefix.n + tail.length
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)], device=self.model.device)
            positions = torch.arange(start, start + len(ids), device=self.model.device).unsqueeze(0)
            logits = run_logits(self.model.network, tokens, positions, run)
        if run.seen != len(self.prefix.layers):
            raise ModelError(
                f"only {run.seen} of {len(self.prefix.layers)} layers of {self.model.id} passed through dropkv: use another model"
            )
        tail.length += len(ids)
        return logits[0, -1]

    def tokens(self, logits: Tensor, tail: Tail, sampling: Sampling, limit: int, pending: list[int]) -> Iterator[int]:
        """The tokens of an answer that begins with one chosen from `logits`, without end; limit: as many as will be asked for. Each is put into the
        tail when the next one is asked for, which empties `pending`. On a GPU the steps behind the first token are captured."""
        choose = Chooser(sampling)
        token = choose(logits)
        yield token
        self._captures = self._captures and captures(self.model)
        if limit >= WORTH_CAPTURING and self._captures:
            from dropkv.decode.captured import tokens_behind

            drawn = None if sampling.temperature == 0 else draws(sampling, limit)
            for following in tokens_behind(self.model, self.prefix, tail, token, sampling, drawn, limit):
                pending.clear()
                yield following
            self._captures = False  # it has ended at once
        while True:
            logits = self.forward([token], tail)
            pending.clear()
            token = choose(logits)
            yield token

    def text(self, tokens: Sequence[int]) -> str:
        """Decoded answer tokens: special tokens are left out, and so are bytes at the end that are not yet a character."""
        return self._text(tokens)


class Chat:
    """A conversation: each turn sees the document and the turns before it; `turns` is what was said so far.

    `dropkv.transcripts` has save_turns and read_turns, for conversations on disk.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.turns: list[Turn] = []
        self._tail = Tail()
        self._pending: list[int] = []  # answer tokens the model has chosen but not yet read

    def stream(self, question: str, sampling: Sampling | None = None) -> Stream:
        """The next turn's answer, piece by piece. An abandoned stream leaves what it had generated as the answer of its turn.

        Raises QuestionError when it does not fit behind the turns so far, ModelError when the template has one turn only.
        """
        ids = [*self._pending, *self._asked(question, first=not self.turns)]
        self.session.room(len(self._tail) + len(ids), 1)
        return Stream(self.session, self._tail, question, ids, check_sampling(sampling), self._pending, self.turns)

    def ask(self, question: str, sampling: Sampling | None = None) -> Answer:
        """The next turn's whole answer. Raises what `stream` raises."""
        return self.stream(question, sampling).result()

    def reset(self) -> None:
        """Forget all turns; the document stays."""
        self.turns.clear()
        self._pending.clear()
        self._tail = Tail()

    def resume(self, turns: Sequence[Turn]) -> None:
        """Forget all turns and go on behind these, which are read in one forward call. Raises QuestionError when they do not fit."""
        if not isinstance(turns, Sequence) or not all(isinstance(turn, Turn) for turn in turns):
            raise QuestionError(
                "turns are what the `turns` of a conversation holds, or what transcripts.read_turns gives"
            )
        turns = tuple(turns)  # they may be our own, which are about to be forgotten
        ids: list[int] = []
        for number, turn in enumerate(turns):
            ids += [*self._asked(turn.question, first=number == 0), *turn.tokens]
        self.session.room(len(ids), 1)
        self.reset()
        last = turns[-1].tokens[-1:] if turns else []
        if ids:
            self.session.forward(ids[: len(ids) - len(last)], self._tail)
        self._pending += last
        self.turns += [Turn(turn.question, list(turn.tokens), turn.stopped) for turn in turns]

    def _asked(self, question: str, *, first: bool) -> list[int]:
        seam = self.session.seam
        return seam.question_ids(question) if first else seam.follow_up_ids(question)
