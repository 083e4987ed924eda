"""A batch on a GPU: steps are launched ahead of the host, which reads the tokens of one step while the next one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from dropkv.cache import Prefix, Tail
from dropkv.decode.batch import PACK, Batch, Row
from dropkv.decode.kernel_run import KernelRun, KernelsUnusable, usable
from dropkv.decode.rows import Piece
from dropkv.decode.step import Flight, RowState, Step
from dropkv.models import Model
from dropkv.settings import Sampling

AHEAD = 1  # steps that are launched before the tokens of an earlier one are looked at
SHARE = 8  # questions are read once so large a part of the rows is free: reading costs as much as some steps


class CapturedBatch(Batch):
    """A batch whose steps are captured, one graph for each bucket of rows."""

    def __init__(self, model: Model, rows: int, capacity: int) -> None:
        super().__init__(model, rows, capacity + AHEAD)
        self._step: Step | None = None
        self._flights: deque[tuple[list[Row | None], Flight]] = deque()
        self._placed = False
        self._plain = False
        self._first = True
        self._reader: KernelRun | None = None

    def wanted(self, waiting: int) -> int:
        free = self.free
        return min(free, waiting) if free * SHARE >= self.tails.rows or free >= waiting else 0

    def admit(self, rows: Sequence[Row]) -> None:
        if rows:
            self._land(0)
            super().admit(rows)
            self._placed = False

    def _read(self, pieces: Sequence[Piece]) -> Tensor:
        """By the kernels, but the first ones, which do not wait for them to be compiled, and long ones."""
        first, self._first = self._first, False
        if first or self._plain or sum(len(piece.ids) for piece in pieces) > PACK:
            return super()._read(pieces)
        prefixes = _different([piece.prefix for piece in pieces])
        reader = self._reader
        try:
            if reader is None or not set(prefixes) <= set(reader.layout.prefixes):
                reader = self._reader = KernelRun(self.model, self.tails, prefixes, PACK)
            return usable(self.model, lambda: reader.read(self.model, pieces))
        except KernelsUnusable:
            self._plain = True
            return super()._read(pieces)

    def step(self) -> list[Row]:
        if self._plain:
            return super().step()
        done = self._sweep()
        rows = self.rows
        if self._step is not None and 4 * len(rows) <= self._step.rows:
            self._placed = False
        if not self._placed:
            self._land(0)
            done += self._sweep()
            self._close_up()
            rows = self.rows
            if rows:
                self._place(rows)
        if rows:
            assert self._step is not None
            flight = launched(self._step)
            if flight is None:
                self._plain = True
                return done + super().step()
            self._flights.append((list(self._slots), flight))
            self._land(AHEAD)
        return done + self._sweep()

    def _land(self, left: int) -> None:
        """Take the tokens of all steps but the last `left`."""
        while len(self._flights) > left:
            slots, flight = self._flights.popleft()
            for row, token in zip(slots, flight.tokens(), strict=False):
                if row is not None and not row.done:
                    row.take(token, self.model.stop_ids)

    def _place(self, rows: Sequence[Row]) -> None:
        prefixes = _different([row.asked.prefix for row in rows])
        bucket = min(self.tails.rows, 1 << (len(rows) - 1).bit_length())
        sampled = any(row.drawn is not None for row in rows)
        step = self._step
        known = step is not None and set(prefixes) <= set(step.prefixes)
        if step is None or not known or step.rows < len(rows) or step.rows > 2 * bucket or sampled > step.sampled:
            self._step = None  # its memory goes before the next one's comes
            step = self._step = Step(self.model, self.tails, prefixes, bucket, sampled=sampled)
        step.place([_state(row) for row in rows])
        self._placed = True


def _different(prefixes: Sequence[Prefix]) -> list[Prefix]:
    return list(dict.fromkeys(prefixes))


def _state(row: Row) -> RowState:
    sampling = row.asked.sampling
    return RowState(
        row.asked.prefix, row.tokens[-1], row.length, sampling.temperature, sampling.top_p, row.drawn, len(row.tokens)
    )


def launched(step: Step) -> Flight | None:
    """A launch, or None where decode kernels cannot be used, which is said in a line on standard error."""
    try:
        return step.launch()
    except KernelsUnusable:
        return None


def tokens_behind(
    model: Model, prefix: Prefix, tail: Tail, token: int, sampling: Sampling, drawn: Tensor | None, limit: int
) -> Iterator[int]:
    """The tokens after `token`, the first of an answer of at most `limit`, which is not in the tail yet. The tail's length grows by one
    with each token that is given. Ends at once where decode kernels cannot be used."""
    tails = tail.as_row(limit + AHEAD)
    step = tail.step
    sampled = drawn is not None
    if not (
        isinstance(step, Step) and step.run.tails is tails and step.prefixes == (prefix,) and step.sampled == sampled
    ):
        step = tail.step = Step(model, tails, [prefix], 1, sampled=sampled)
    step.place([RowState(prefix, token, tail.length, sampling.temperature, sampling.top_p, drawn, 1)])
    flight = launched(step)
    if flight is None:
        tail.step = None
        return
    flights = deque([flight])
    while True:
        flights.append(step.launch())
        (following,) = flights.popleft().tokens()
        tail.length += 1
        yield following
