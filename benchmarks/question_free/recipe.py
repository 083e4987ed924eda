"""A recipe: how the statistics of the replays become kept sets. Small named objects, so that a hundred of them are a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.question_free.keep import Ranking, Rule
from benchmarks.question_free.text import How, Text, pooled_in_runs
from dropkv.methods import Pool

TINY = 1e-12
SHARED = Rule()
Seen = Mapping[str, Mapping[str, Tensor]]  # observer -> statistic -> [..., layers, kv_heads, G, n]


@dataclass(frozen=True)
class Part:
    """One statistic of one observer, reduced over a KV head's query heads, then raised to `power`."""

    statistic: str = "step/max"
    observer: str = "replay"
    group: Literal["max", "mean"] = "max"
    power: float = 1.0

    def of(self, seen: Seen) -> Tensor:
        """float32 [..., layers, kv_heads, n] from statistics [..., layers, kv_heads, G, n]."""
        x = seen[self.observer][self.statistic].float()
        x = x.amax(-2) if self.group == "max" else x.mean(-2)
        return x if self.power == 1.0 else x.pow(self.power)


STANDING, SEED = Part("p/told"), Part("step/sum")


@dataclass(frozen=True)
class Recipe:
    """From statistics to kept sets, in this order:

    parts: put together by `fuse`: "max", "mean", "product", or "ranks", the mean of their ranks inside each head.
    surprise: times the token's own nats, at most so many (0: not at all).
    balance: over the "mean", "max" or 90 % point ("high") of each "head" or "layer", to the power `balance_power`; "head ranks": ranks;
    "pooled mean": over the sum of the layer's pooled scores (arXiv 2605.07234).
    floor: an entry counts at least so many times its head's mean.
    pool: steps, "max 5" or "mean 5" along the tokens, "words max|sum|l2|mean" and "sentences ..." inside those runs.
    together: times the token's standing to this power: the mean of `standing` over all heads of all layers, pooled by `standing_pool`. Heads
    then keep the same tokens. standing None: the token's nats. scope: the heads of the "model", of the "layer" alone, or of the layers "so far",
    the last two known while the layers go by.
    heads: only this share of all heads, those with the largest mean score, share what is not forced; 0 for all.
    grow: that share is one for a budget of 5 %, and grows with the budget to this power (kept sets are then nested only where each head's
    part grows with the budget).
    fade: the heads in the order of their mean scores count less and less, half after every such share of all heads; 0: all alike.
    rule: the budgets and what is forced. own: what decides inside a head about the part that every head has (alpha), None for the score.
    seed: every head first keeps so many entries, the best by `seed_part`.
    """

    name: str
    parts: tuple[Part, ...] = (Part(),)
    fuse: Literal["max", "mean", "product", "ranks"] = "max"
    surprise: float = 0.0
    balance: str = ""
    balance_power: float = 1.0
    floor: float = 0.0
    pool: tuple[str, ...] = ()
    together: float = 0.0
    standing: Part | None = STANDING
    standing_pool: tuple[str, ...] = ()
    scope: Literal["model", "layer", "so far"] = "model"
    heads: float = 0.0
    grow: float = 0.0
    fade: float = 0.0
    rule: Rule = SHARED
    own: Part | None = None
    seed: int = 0
    seed_part: Part = SEED

    @property
    def wanted(self) -> set[tuple[str, str]]:
        """(observer, statistic) pairs it needs."""
        parts = [*self.parts, *([self.seed_part] if self.seed else [])]
        parts += [self.own] if self.own is not None else []
        if self.together and self.standing is not None:
            parts.append(self.standing)
        return {(part.observer, part.statistic) for part in parts}

    @property
    def needs_nats(self) -> bool:
        """Whether the nats of the document's tokens count for it."""
        told = any(statistic.endswith("/told") for _, statistic in self.wanted)
        return told or self.surprise > 0 or (self.together > 0 and self.standing is None)

    def ranking(self, seen: Seen, told: Tensor, text: Text, budget: float = 0.05) -> Ranking:
        """The order in which a document's entries are kept. told float32 [n]: nats of its tokens. budget: what `grow` goes by. Of several
        documents of one length at once: everything with one dimension more in front."""
        return Ranking(self.rule, *self.scores(seen, told, text, budget))

    def scores(
        self, seen: Seen, told: Tensor, text: Text, budget: float = 0.05
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `ranking` goes by, [..., layers, kv_heads, n] each: the scores, those that settle ties, and what decides inside a head."""
        raw = self._scores(seen, told)
        pooled = _pooled(self._balanced(raw), self.pool, text)
        if self.balance == "pooled mean":
            pooled = pooled / pooled.sum((-2, -1), keepdim=True).clamp(min=TINY)
        if self.floor:
            pooled = pooled.maximum(self.floor * pooled.mean(-1, keepdim=True))
        if self.together:
            nats = told[..., None, None, :]
            standing = nats if self.standing is None else self._standing(self.standing.of(seen))
            standing = _pooled(standing, self.standing_pool, text)
            pooled = pooled * standing.clamp(min=TINY).pow(self.together)
        if self.heads:
            means = raw.mean(-1)
            share = min(1.0, self.heads * (budget / 0.05) ** self.grow)
            flat = means.flatten(-2)
            least = flat.topk(max(1, round(share * flat.shape[-1]))).values[..., -1:]
            pooled = pooled * (means >= least.unsqueeze(-1)).unsqueeze(-1)
        if self.fade:
            means = raw.mean(-1)
            flat = means.flatten(-2)
            place = (-flat).argsort(-1).argsort(-1).view_as(means)
            pooled = pooled * torch.exp2(-place / (self.fade * flat.shape[-1])).unsqueeze(-1)
        if self.seed:
            best = self.seed_part.of(seen).topk(min(self.seed, raw.shape[-1]), -1).indices
            pooled = pooled.scatter(-1, best, torch.finfo(torch.float32).max)
        return pooled, raw, None if self.own is None else self.own.of(seen)

    def _standing(self, x: Tensor) -> Tensor:
        """Means over heads, [..., 1, 1, n] or [..., layers, 1, n]."""
        own = x.mean(-2, keepdim=True)
        if self.scope == "model":
            return own.mean(-3, keepdim=True)
        if self.scope == "so far":
            own = own.cumsum(-3) / torch.arange(1, own.shape[-3] + 1, device=x.device).view(-1, 1, 1)
        return own

    def _scores(self, seen: Seen, told: Tensor) -> Tensor:
        parts = [part.of(seen) for part in self.parts]
        if self.fuse == "ranks":
            parts = [_ranks(part) for part in parts]
        x = torch.stack(parts)
        x = x.amax(0) if self.fuse == "max" else x.prod(0) if self.fuse == "product" else x.mean(0)
        return x * told[..., None, None, :].clamp(max=self.surprise) if self.surprise else x

    def _balanced(self, x: Tensor) -> Tensor:
        """Scores made comparable between heads or layers."""
        if self.balance in ("", "pooled mean"):
            return x
        where, by = self.balance.split()
        if by == "ranks":
            return _ranks(x)
        whole = x if where == "head" else x.flatten(-2).unsqueeze(-2)
        if by == "mean":
            level = whole.mean(-1, keepdim=True)
        elif by == "max":
            level = whole.amax(-1, keepdim=True)
        else:
            level = whole.kthvalue(max(1, round(0.9 * whole.shape[-1])), dim=-1, keepdim=True).values
        return x / level.clamp(min=TINY).pow(self.balance_power)


def _pooled(x: Tensor, steps: tuple[str, ...], text: Text) -> Tensor:
    for step in steps:
        kind, how = step.split()
        if kind in ("words", "sentences"):
            inside: How = how  # type: ignore[assignment]
            x = pooled_in_runs(x, getattr(text, kind), inside)
        else:
            x = Pool("max" if kind == "max" else "avg", int(how))(x)
    return x


def _ranks(x: Tensor) -> Tensor:
    """1 for a head's largest score, towards 0 for its smallest."""
    return (x.argsort(-1).argsort(-1) + 1) / x.shape[-1]
