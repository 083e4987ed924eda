"""What a method is: a score per key, how it is reduced and pooled, and the rule that turns scores into kept sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dropkv.kernels.score import MAX_MAX, SUM_MEAN, Block, Observed, Reduction, score_blocks

Rule = Literal["uniform", "head-adaptive"]
Unobserved = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Pool:
    """Pooling along the keys, stride 1, centred: "max" with nothing outside, "avg" with zeros outside, divided by the whole kernel."""

    kind: Literal["max", "avg"]
    size: int

    def __call__(self, scores: Tensor) -> Tensor:
        """Pooled scores, same shape as `scores` [kv_heads, n]."""
        if self.size == 1:
            return scores
        if self.kind == "max":
            return F.max_pool1d(scores.unsqueeze(1), self.size, stride=1, padding=self.size // 2).squeeze(1)
        return F.avg_pool1d(
            scores.unsqueeze(1), self.size, stride=1, padding=self.size // 2, count_include_pad=True
        ).squeeze(1)


@dataclass(frozen=True)
class Method:
    """One way of choosing what is kept.

    Either `observed` (a contribution per query and key, from attention) or `unobserved` (scores [kv_heads, n] from keys, values and a seed)
    is set. `power` raises an odds score; `forced_last` newest and `forced_first` oldest entries are kept whatever their score.
    """

    name: str
    summary: str
    observed: Callable[[Block, int], Tensor] | None = None
    unobserved: Unobserved | None = None
    power: int = 1
    reduction: Reduction = SUM_MEAN
    pool: Pool | None = None
    rule: Rule = "uniform"
    alpha: float = 0.2
    forced_first: int = 0
    forced_last: int = 8
    keeps_all: bool = False

    def scores(self, queries: Observed) -> Tensor:
        """Scores float32 [kv_heads, columns] of observation queries; for methods with `observed`."""
        observed = self.observed
        assert observed is not None
        if observed is odds_times_distance and self.power == 1 and self.reduction.queries == "max":
            return score_blocks(
                queries,
                lambda block: odds_times_distance(block, 2),
                self.reduction,
                lambda squares: squares.clamp_(min=0).sqrt_(),
            )
        return score_blocks(queries, lambda block: observed(block, self.power), self.reduction)

    def under_replay(self, head_tokens: int) -> Method:
        """The same score for replayed queries (METHODS, "What an observer changes"): the largest contribution of any query of any head counts,
        unsquared; template head and first 4 tokens and the last 4 are kept. Scores that need no queries stay as they are."""
        if self.observed is None:
            return self
        return replace(
            self, power=1, reduction=MAX_MAX, pool=Pool("max", 5), forced_first=max(4, head_tokens), forced_last=4
        )

    def pooled(self, scores: Tensor) -> Tensor:
        """Scores [kv_heads, n] as the rule sees them."""
        return scores if self.pool is None else self.pool(scores)


def odds_times_distance(block: Block, power: int) -> Tensor:
    """(p / (1 - p + eps))^power * ||a - v||^power [rows, c]: what one query's output moves when one key is dropped (DropKV)."""
    squared = block.squared_distance()
    odds = block.odds()
    if power == 2:
        return squared.mul_(odds).mul_(odds)
    return odds.mul_(squared.clamp_(min=0).sqrt_())


def probability(block: Block, power: int) -> Tensor:
    """p, the attention probability itself."""
    return block.probability()


def unit(x: Tensor) -> Tensor:
    """x [..., d] scaled to length 1 in float32 (or float64)."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
