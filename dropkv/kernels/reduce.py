"""From one number per query head, query and key to one per KV head and key, block by block.

A reduction over queries never needs more than the running state of one KV head, so the blocks may hold as few queries as memory allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduce = Literal["sum", "max", "mean", "l2", "last", "ema", "var", "mean+200var"]
Group = Literal["sum", "max", "mean", "all heads"]

EMA = 0.3  # ReST-KV: share of the newest query
SPREAD = 200.0  # CAKE: weight of the variance beside the mean


@dataclass(frozen=True)
class Reduction:
    """How the contributions of all queries of a KV head become one score per key: first over queries, then over the group's heads.

    Over queries: sum, max, mean; l2, the root of the sum of squares; last, the newest query alone; ema, the moving average
    e_1 = i_1, e_t = 0.7 e_(t-1) + 0.3 i_t, oldest query first; var, the unbiased variance over the queries (0 for one query); mean+200var.
    Over the group: sum, max, mean; all heads, the mean over every head of the layer, the same for every KV head.
    """

    queries: Reduce
    group: Group


SUM_MEAN = Reduction("sum", "mean")
MAX_MAX = Reduction("max", "max")


class Running:
    """The reduction over queries while the blocks of some KV heads go by: `add` them in order, then take the `result`.

    shape: (KV heads, query heads per KV head, columns) of the result.
    """

    def __init__(self, how: Reduce, shape: tuple[int, int, int], queries: int, like: Tensor) -> None:
        self.how = how
        self.queries = queries
        self.state = like.new_full(shape, -torch.inf if how == "max" else 0.0)
        self.spread = torch.zeros_like(self.state) if how in ("var", "mean+200var") else None

    def add(self, part: Tensor, first: int) -> None:
        """Take in the contributions [h, group, rows, c <= columns] of the queries from `first` on; keys beyond c get nothing from them."""
        rows, seen = part.shape[2:]
        state = self.state[..., :seen]
        if self.how == "max":
            torch.maximum(state, part.amax(2), out=state)
        elif self.how == "l2":
            state += part.square().sum(2)
        elif self.how == "last":
            if first + rows == self.queries:
                state += part[:, :, -1]
        elif self.how == "ema":
            state += torch.einsum("hgrc,r->hgc", part, self._shares(first, part))
        elif self.spread is not None:
            self._add_spread(part, first)
        else:
            state += part.sum(2)

    def result(self) -> Tensor:
        """Reduced contributions [h, group, columns]; keys that no query sees have 0."""
        if self.how == "max":
            return self.state.masked_fill_(self.state == -torch.inf, 0)
        if self.how == "mean":
            return self.state / self.queries
        if self.how == "l2":
            return self.state.sqrt()
        if self.spread is not None:
            variance = self.spread / max(1, self.queries - 1)
            return variance if self.how == "var" else self.state + SPREAD * variance
        return self.state

    def _shares(self, first: int, part: Tensor) -> Tensor:
        age = self.queries - 1 - first - torch.arange(part.shape[2], device=part.device, dtype=part.dtype)
        shares = EMA * (1 - EMA) ** age
        if first == 0:
            shares[0] /= EMA  # the average starts as the oldest contribution itself
        return shares

    def _add_spread(self, part: Tensor, first: int) -> None:
        """Mean and squared deviations of two sets of queries merged (Chan et al. 1979): differences of large sums are never taken."""
        assert self.spread is not None
        rows, seen = part.shape[2:]
        mean, spread = torch.zeros_like(self.state), torch.zeros_like(self.state)
        mean[..., :seen] = part.mean(2)
        spread[..., :seen] = (part - part.mean(2, keepdim=True)).square().sum(2)
        step = mean - self.state
        both = first + rows
        self.spread += spread + step.square() * (first * rows / both)
        self.state += step * (rows / both)


def over_group(scores: Tensor, how: Group, documents: int = 1) -> Tensor:
    """[kv_heads, group, columns] -> [kv_heads, columns]; the KV heads are those of so many documents, one document after another."""
    if how == "max":
        return scores.amax(1)
    if how == "all heads":
        own = scores.view(documents, -1, scores.shape[-1])  # each document's query heads
        return own.mean(1).repeat_interleave(scores.shape[0] // documents, 0)
    return scores.sum(1) if how == "sum" else scores.mean(1)
