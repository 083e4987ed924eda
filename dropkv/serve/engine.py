"""One thread that answers for everybody: a request joins the batch that is running, and leaves it when it is done or nobody waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from dropkv.decode.batch import ROUND, Asked, Batch, Row, make_batch
from dropkv.models import Model

MOST_WAITING = 1024  # requests; more would wait longer than anybody does


class Busy(Exception):
    """Too many requests are waiting already."""


class Ticket:
    """A request that was handed in. Its tokens only grow; once it is done nothing changes. error: why there is no whole answer."""

    def __init__(self, asked: Asked) -> None:
        self.row = Row(0, asked)
        self.error: Exception | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of the answer so far, without one that ended it."""
        return self.row.tokens

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.row.done

    @property
    def stopped(self) -> bool:
        """Whether the model ended the answer itself."""
        return self.row.stopped


class Lane:
    """A batch, those who are in it, and those who wait for a row of it. rows: None for a batch of one row, made for each request."""

    def __init__(self, model: Model, rows: int | None, capacity: int) -> None:
        self.model = model
        self.rows = rows
        self.capacity = capacity
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self.batch = None if rows is None else make_batch(model, rows, capacity)

    def take(self) -> list[Ticket]:
        """Those who may go in now."""
        count = len(self.waiting)
        wanted = min(self.rows or 1, count) if self.batch is None else self.batch.wanted(count)
        fresh = [self.waiting.popleft() for _ in range(wanted)]
        self.running += fresh
        return fresh

    def turn(self, fresh: Sequence[Ticket]) -> list[Ticket]:
        """Read the questions of those who came, then one more token for everybody; gives all for whom something changed."""
        everybody = list(self.running)
        try:
            batch = self.batch = self.batch or self._made(fresh)
            try:
                batch.admit([ticket.row for ticket in fresh])
            except Exception as error:  # the others have their own rows and lose nothing
                _fail([ticket for ticket in fresh if not ticket.tokens and not ticket.done], error)
            batch.step()
        except Exception as error:
            _fail(everybody, error)
            self.batch = None
        self.running = [ticket for ticket in everybody if not ticket.done]
        if self.rows is None and not self.running:
            self.batch = None
        return everybody

    def _made(self, fresh: Sequence[Ticket]) -> Batch:
        longest = max((ticket.row.asked.length for ticket in fresh), default=1)
        return make_batch(self.model, self.rows or 1, self.capacity if self.rows else -(-longest // ROUND) * ROUND)


class Engine:
    """Rows of one model for the requests of many, over any number of documents.

    rows: answered at once. capacity: tokens that a row has room for, question and answer together; a request that needs more is answered
    beside the others, one such at a time, in a row made for it. tell: called in the engine's thread with the tickets that have changed.
    """

    def __init__(self, model: Model, rows: int, capacity: int, tell: Callable[[Sequence[Ticket]], None]) -> None:
        self.capacity = capacity
        self.rows = rows
        self._tell = tell
        self._short, self._long = self._lanes = (Lane(model, rows, capacity), Lane(model, None, 0))
        self._given_up: list[Ticket] = []
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="dropkv-engine", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self, seconds: float = 10.0) -> None:
        """Answer nobody any more; waits for the step that is running."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def submit(self, asked: Asked) -> Ticket:
        """Hand in a request. Raises Busy."""
        ticket = Ticket(asked)
        with self._changed:
            lane = self._short if asked.length <= self.capacity else self._long
            if self.waiting >= MOST_WAITING:
                raise Busy
            lane.waiting.append(ticket)
            self._changed.notify()
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """Nobody waits for this one any more: its place is free with the next step."""
        if ticket.done:
            return
        with self._changed:
            self._given_up.append(ticket)
            self._changed.notify()

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return sum(len(lane.running) for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return sum(len(lane.waiting) for lane in self._lanes)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._given_up or self.running or self.waiting)
                if self._closing:
                    return
                for ticket in self._given_up:
                    ticket.row.done = True
                    for lane in self._lanes:
                        if ticket in lane.waiting:
                            lane.waiting.remove(ticket)
                self._given_up.clear()
                turns = [(lane, lane.take()) for lane in self._lanes]
            for lane, fresh in turns:
                if lane.running:
                    self._tell(lane.turn(fresh))


def _fail(tickets: Sequence[Ticket], error: Exception) -> None:
    for ticket in tickets:
        if not ticket.done:
            ticket.error = error
            ticket.row.done = True
