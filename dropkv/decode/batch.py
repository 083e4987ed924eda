"""Answers to many questions at once: a fixed number of rows, each taking the next question when its answer is done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor

from dropkv.cache import Prefix
from dropkv.decode.rows import Piece, forward_rows
from dropkv.decode.sampling import choose, draws
from dropkv.decode.tails import Tails, row_bytes
from dropkv.errors import UsageError
from dropkv.memory import spare_memory
from dropkv.models import Model
from dropkv.settings import Sampling

MOST = 64  # rows, unless more are asked for
SHARE = 0.5  # of the memory that is free, for tails and logits
PACK = 256  # questions are read together up to so many tokens: enough to keep a GPU busy, little memory
ROUND = 16  # capacities are multiples


@dataclass(frozen=True)
class Asked:
    """A question ready to be answered: the document it is asked of, its token ids, and the most tokens of its answer (at least 1)."""

    prefix: Prefix
    ids: tuple[int, ...]
    sampling: Sampling
    limit: int

    @property
    def length(self) -> int:
        """Tokens that its tail may have to hold."""
        return len(self.ids) + self.limit


@dataclass(eq=False)
class Row:
    """A question and its answer so far. number: its place among the questions. Seconds are counted from when its tokens begin to be computed."""

    number: int
    asked: Asked
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    done: bool = False
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        sampling = self.asked.sampling
        self.drawn = None if sampling.temperature == 0 else draws(sampling, self.asked.limit)

    @property
    def length(self) -> int:
        """Tokens in its tail: the question and every token of the answer but the newest."""
        return len(self.asked.ids) + len(self.tokens) - 1

    def take(self, token: int, stops: frozenset[int]) -> None:
        """One more token."""
        self.ended = time.perf_counter()
        self.first = self.first or self.ended
        if token in stops:
            self.stopped = self.done = True
            return
        self.tokens.append(token)
        self.done = len(self.tokens) >= self.asked.limit


class Batch:
    """So many rows of one model, each with a tail of `capacity` tokens. Rows may belong to different documents."""

    def __init__(self, model: Model, rows: int, capacity: int) -> None:
        self.model = model
        self.tails = Tails.of(model.geometry, model.devices, model.dtype, rows, capacity)
        self._slots: list[Row | None] = []

    def wanted(self, waiting: int) -> int:
        """How many of so many waiting questions should be admitted now."""
        return min(self.free, waiting)

    @property
    def free(self) -> int:
        """Rows without a question."""
        return self.tails.rows - len(self.rows)

    @property
    def rows(self) -> list[Row]:
        """The questions that are being answered."""
        return [row for row in self._slots if row is not None]

    def admit(self, rows: Sequence[Row]) -> None:
        """Read questions, at most as many as there are free rows, and choose the first token of each answer."""
        holes = [slot for slot, row in enumerate(self._slots) if row is None]
        slots = [*holes, *range(len(self._slots), self.tails.rows)][: len(rows)]
        for row, slot in zip(rows, slots, strict=True):
            self._slots += [None] * (slot + 1 - len(self._slots))
            self._slots[slot] = row
        for pack in _packs(list(zip(rows, slots, strict=True))):
            started = time.perf_counter()
            pieces = [Piece(slot, row.asked.prefix, 0, row.asked.ids) for row, slot in pack]
            self._choose([row for row, _ in pack], self._read(pieces), started)

    def _read(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits [pieces, vocabulary] behind questions, whose tokens are put into the tails."""
        return forward_rows(self.model, self.tails, pieces)

    def step(self) -> list[Row]:
        """One more token for every row; gives the rows whose answers are done, whose places are free then."""
        done = self._sweep()
        self._close_up()
        rows = self.rows
        if rows:
            pieces = [Piece(slot, row.asked.prefix, row.length, row.tokens[-1:]) for slot, row in enumerate(rows)]
            self._choose(rows, forward_rows(self.model, self.tails, pieces))
        return done + self._sweep()

    def _sweep(self) -> list[Row]:
        """The rows that are done leave their places."""
        done = [row for row in self.rows if row.done]
        self._slots = [None if row is None or row.done else row for row in self._slots]
        return done

    def _choose(self, rows: Sequence[Row], logits: Tensor, started: float = 0.0) -> None:
        for row, token in zip(rows, next_tokens(rows, logits), strict=True):
            row.started = row.started or started
            row.take(token, self.model.stop_ids)

    def _close_up(self) -> None:
        """The last rows move into the places that nobody took, so that rows in use are the first ones."""
        while None in self._slots:
            last = self._slots.pop()
            if last is None:
                continue
            hole = self._slots.index(None)
            self.tails.move(len(self._slots), hole, last.length)
            self._slots[hole] = last


def next_tokens(rows: Sequence[Row], logits: Tensor) -> list[int]:
    """The next token of each row for logits [rows, vocabulary]."""
    if all(row.drawn is None for row in rows):
        chosen = logits.argmax(-1)
    else:
        wanted = [
            (
                row.asked.sampling.temperature,
                row.asked.sampling.top_p,
                0.0 if row.drawn is None else float(row.drawn[len(row.tokens)]),
            )
            for row in rows
        ]
        chosen = choose(logits, *torch.tensor(wanted, dtype=torch.float64, device=logits.device).unbind(1))
    return [int(token) for token in chosen.tolist()]


def answer_all(model: Model, asked: Sequence[Asked], rows: int | None = None) -> Iterator[Row]:
    """The answers to all questions in the order in which they are done. rows: how many at once, None for what fits into memory, at most MOST.

    Raises UsageError for more rows than fit.
    """
    if not asked:
        return
    capacity = -(-max(one.length for one in asked) // ROUND) * ROUND
    if rows is None:
        rows = fitting_rows(model, capacity)
    else:
        _refuse_too_many(model, min(rows, len(asked)), capacity)
    yield from run_batch(make_batch(model, min(rows, len(asked)), capacity), asked)


def run_batch(batch: Batch, asked: Sequence[Asked]) -> Iterator[Row]:
    """All questions through the rows of a batch, in the order in which they are done; no tail may be longer than the batch's."""
    waiting = deque(Row(number, one) for number, one in enumerate(asked))
    while waiting or batch.rows:
        batch.admit([waiting.popleft() for _ in range(batch.wanted(len(waiting)))])
        yield from batch.step()


def make_batch(model: Model, rows: int, capacity: int) -> Batch:
    """A batch whose steps are captured where they can be, else a plain one."""
    if not captures(model):
        return Batch(model, rows, capacity)
    from dropkv.decode.captured import CapturedBatch

    return CapturedBatch(model, rows, capacity)


def captures(model: Model) -> bool:
    """Whether steps of this model can be captured: all of it is on one GPU, and Triton is installed."""
    device = model.device
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return all(weights.device == device for weights in model.network.parameters())


def _refuse_too_many(model: Model, rows: int, capacity: int) -> None:
    """Raise UsageError for more rows than the memory takes, before anything is asked of it."""
    spare, wanted = spare_memory(model.device), rows * row_bytes(model.geometry, model.dtype, capacity)
    if spare is not None and rows > 1 and wanted > spare:
        raise UsageError(
            f"{rows} answers at once may take {wanted / 2**30:.1f} GiB, {spare / 2**30:.1f} GiB are free: "
            f"use a smaller --batch-size, or leave it out"
        )


def fitting_rows(model: Model, capacity: int) -> int:
    """How many rows of that capacity the free memory takes, from 1 to MOST."""
    spare = spare_memory(model.device)
    if spare is None:
        return MOST
    vocabulary = int(model.network.config.vocab_size)
    each = row_bytes(model.geometry, model.dtype, capacity) + 16 * vocabulary
    return max(1, min(MOST, int(SHARE * spare) // each))


def _packs(rows: list[tuple[Row, int]]) -> Iterator[list[tuple[Row, int]]]:
    """Questions that are read in one forward call: up to PACK tokens together, or a longer one alone."""
    pack: list[tuple[Row, int]] = []
    count = 0
    for row, slot in rows:
        if pack and count + len(row.asked.ids) > PACK:
            yield pack
            pack, count = [], 0
        pack.append((row, slot))
        count += len(row.asked.ids)
    if pack:
        yield pack
