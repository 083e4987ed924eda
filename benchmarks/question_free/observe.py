"""What is seen while a document is read with replays: many statistics of every key at once, each per query head.

One prefill gives them all, for all observers. They are collected through `Method.beside_window`, which is handed the probes' queries themselves,
so nothing of the library knows about them. "told" statistics weigh a query by how little the document's own words told of the token it predicts:
the negative log-likelihood of that token in a plain reading (nats). "copy" is what a query pays to the very token it is to repeat next, "same"
to the one it has just repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dropkv.kernels.score import Block, Observed
from dropkv.methods import Method
from dropkv.methods._base import MAX_MAX, probability

TOP = 4  # queries whose mean counts in the "top" statistics


class Glance:
    """A block of queries; what several statistics share is computed once. All are [kv heads, G, queries, keys]."""

    def __init__(self, block: Block, group: int) -> None:
        self.block, self.group = block, group

    def _view(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.group, x.shape[1] // self.group, -1)

    @cached_property
    def p(self) -> Tensor:
        return self._view(self.block.probability())

    @cached_property
    def odds(self) -> Tensor:
        return self._view(self.block.odds())

    @cached_property
    def distance(self) -> Tensor:
        return self._view(self.block.squared_distance().clamp_(min=0).sqrt_())

    @cached_property
    def step(self) -> Tensor:
        """p / (1 - p) ||a - v||: how far the query's output moves without the key."""
        return self.odds * self.distance

    @cached_property
    def step_behind(self) -> Tensor:
        """The same behind the output projection."""
        return self.odds * self._view(self.block.squared_distance_projected().clamp_(min=0).sqrt_())

    @cached_property
    def value(self) -> Tensor:
        """||v W_O|| of each query head's own slice [kv heads, G, 1, keys]."""
        projected = self.block.keys.projected
        assert projected is not None
        return projected[..., -2].sqrt().unsqueeze(2)

    @cached_property
    def length(self) -> Tensor:
        """||a|| [kv heads, G, queries, 1]."""
        return self._view(self.block.output.norm(dim=-1, keepdim=True))


Look = Callable[[Glance], Tensor]
LOOKS: dict[str, Look] = {
    "step": lambda glance: glance.step,
    "p": lambda glance: glance.p,
    "p-value": lambda glance: glance.p * glance.value,
    "p-distance": lambda glance: glance.p * glance.distance,
    "step-wo": lambda glance: glance.step_behind,
    "step-rel": lambda glance: glance.step / glance.length.clamp(min=1e-6),
}
FINISH: dict[str, Callable[[Tensor], Tensor]] = {
    "l4": lambda x: x.sqrt().sqrt(),
    "top": lambda x: x.mean(2),
}
REDUCTIONS = ("max", "l4", "top", "sum", "told", "content", "copy", "same")


@dataclass(frozen=True)
class Statistic:
    """One number per query head and key: a look at every query, reduced over the queries.

    max; l4, the fourth root of the sum of fourth powers; top, the mean of the largest TOP; sum; told, the largest after weighing; content,
    the largest of the queries that repeat (not of the instruction); copy and same, the one query that is to repeat, or has just repeated,
    the key's token.
    """

    look: str
    reduction: str

    @property
    def name(self) -> str:
        return f"{self.look}/{self.reduction}"

    @classmethod
    def of(cls, name: str) -> Statistic:
        """The statistic called "look/reduction"."""
        look, reduction = name.split("/")
        if look not in LOOKS or reduction not in REDUCTIONS:
            raise ValueError(f"no statistic {name!r}")
        return cls(look, reduction)


@dataclass(frozen=True)
class Replay:
    """One probe's tokens: `own` is the document position that each repeats, `next` that of the token it predicts, -1 where there is none, both
    int64 [tokens] on the CPU; `first` is the first scored document position; `turn` counts the probes of one observer that score the same keys."""

    own: Tensor
    next: Tensor
    first: int
    turn: int = 0

    @classmethod
    def of(cls, asking: int, places: Sequence[int], first: int, turn: int = 0) -> Replay:
        """An instruction of `asking` tokens, then the tokens at `places`."""
        own = torch.tensor([-1] * asking + list(places))
        following = torch.roll(own, -1)
        following[-1] = -1
        follows = (following == own + 1) | (own < 0)  # what comes after a jump cannot be predicted
        return cls(own, torch.where(follows, following, -1), first, turn)

    def alike(self, other: Replay) -> bool:
        """Whether both repeat their chunks in the same order."""
        return all(
            torch.equal(torch.where(mine < 0, mine, mine - self.first), torch.where(its < 0, its, its - other.first))
            for mine, its in ((self.own, other.own), (self.next, other.next))
        )


@dataclass(frozen=True)
class Turn:
    """Probes of one observer that score no key twice, and what is wanted of them."""

    observer: str
    statistics: tuple[Statistic, ...]
    replays: tuple[Replay, ...]


class Watch:
    """Collects statistics of the probes of documents that are read together; made for one prefill, which has the probes of all turns in order.

    told float32 [documents, n]: nats of every token in a plain reading, needed for "told" alone. kv_heads: of one document.
    """

    def __init__(self, turns: Sequence[Turn], told: Tensor | None, documents: int, kv_heads: int) -> None:
        self.turns = tuple(turns)
        self.replays = [(number, replay) for number, turn in enumerate(turns) for replay in turn.replays]
        self.told, self.documents, self.kv_heads = told, documents, kv_heads
        self.seen = 0  # replays, which come in their order, layer after layer

    def method(self) -> Method:
        """What makes a prefill call this watch."""
        projected = any(one.look in ("step-wo", "p-value") for turn in self.turns for one in turn.statistics)
        return Method(
            "watch",
            "statistics",
            probability,
            reduction=MAX_MAX,
            beside_window=self,
            projected=projected,
            forced_last=0,
        )

    def __call__(self, queries: Observed) -> Tensor:
        """[statistics of all turns * G, kv_heads, columns] of one probe in one layer, or of neighbours of one shape; `kv_heads` are those of all
        documents, one probe after another. 0 for what other turns see: no statistic is less."""
        kv_heads, group, _, columns = queries.shape
        count = kv_heads // (self.documents * self.kv_heads)
        places = [self.replays[(self.seen + number) % len(self.replays)] for number in range(count)]
        turn, replay = places[0]
        replays = [one for _, one in places]
        statistics = self.turns[turn].statistics
        if any(number != turn or not one.alike(replay) for number, one in places):
            raise ValueError("probes of one shape repeat their chunks in different orders: read one document at a time")
        self.seen += count
        collected: list[list[Tensor]] = [[] for _ in statistics]
        for heads in queries.slabs():
            owners = torch.arange(kv_heads)[heads] // self.kv_heads
            states: list[Tensor | None] = [None] * len(statistics)
            for start, stop, block in queries.blocks(heads):
                glance = Glance(block, group)
                told = None
                if self.told is not None:
                    told = torch.cat([self._told(one, start, stop) for one in replays])[owners]
                for index, one in enumerate(statistics):
                    x = LOOKS[one.look](glance)
                    states[index] = _reduced(one.reduction, states[index], x, start, replay, told)
            for state, one, parts in zip(states, statistics, collected, strict=True):
                assert state is not None
                finish = FINISH.get(one.reduction)
                parts.append(state if finish is None else finish(state))
        own = torch.stack([torch.cat(parts) for parts in collected])  # [statistics, kv_heads, G, columns]
        before = sum(len(one.statistics) for one in self.turns[:turn])
        whole = own.new_zeros((sum(len(one.statistics) for one in self.turns), *own.shape[1:]))
        whole[before : before + len(own)] = own
        return whole.transpose(1, 2).reshape(-1, kv_heads, columns)

    def _told(self, replay: Replay, start: int, stop: int) -> Tensor:
        """What each of the queries [start, stop) has to tell: nats [documents, queries] of the token it predicts, 0 where that is none."""
        assert self.told is not None
        weights = self.told.new_zeros((len(self.told), stop - start))
        known = replay.next[start:stop] >= 0
        weights[:, known.to(weights.device)] = self.told[:, replay.next[start:stop][known]]
        return weights


def joined(how: str, parts: Sequence[Tensor]) -> Tensor:
    """One statistic of several turns, reduced in this way over the queries of all; "top" is that of the turn that has the largest."""
    whole = torch.stack(list(parts))
    if how == "sum":
        return whole.sum(0)
    return whole.square().square().sum(0).sqrt().sqrt() if how == "l4" else whole.amax(0)


def _reduced(how: str, state: Tensor | None, x: Tensor, start: int, replay: Replay, told: Tensor | None) -> Tensor:
    """The state after the queries from `start` on, x [h, G, queries, c]."""
    queries = slice(start, start + x.shape[2])
    if how in ("copy", "same"):
        new = torch.zeros_like(x[:, :, 0]) if state is None else state
        places = (replay.next if how == "copy" else replay.own)[queries]
        inside = (places >= replay.first) & (places < replay.first + x.shape[3])
        rows = torch.nonzero(inside).squeeze(-1)
        columns = (places[rows] - replay.first).to(x.device)
        new[:, :, columns] = x[:, :, rows.to(x.device), columns]
        return new
    if how in ("l4", "sum"):
        new = (x.square().square() if how == "l4" else x).sum(2)
        return new if state is None else state + new
    if how == "top":
        both = x if state is None else torch.cat([state, x], 2)
        return both.topk(min(TOP, both.shape[2]), dim=2).values
    if how == "told":
        assert told is not None
        new = (x * told.to(x)[:, None, :, None]).amax(2)
    elif how == "content":
        rows = torch.nonzero(replay.next[queries] >= 0).squeeze(-1)
        new = x[:, :, rows.to(x.device)].amax(2) if len(rows) else torch.zeros_like(x[:, :, 0])
    else:
        new = x.amax(2)
    return new if state is None else torch.maximum(state, new)
