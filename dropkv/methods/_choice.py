"""From scores to kept entries, layer after layer: which budget rule a method has, and how it is fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.budgets import Kept, recent_half, select, two_stages
from dropkv.kernels.dispatch import select_on_gpu
from dropkv.layer_budgets import BestSoFar, SharedLayers, pyramid_counts
from dropkv.methods._base import LayerScores, Method
from dropkv.methods._together import Orders
from dropkv.two_orders import TwoOrders
from dropkv.words import Words

STAGE_TWO_EPS = 1e-4  # CriticalKV: so that a token without attention still counts by its value


class Choice:
    """Chooses the entries of one document's layers (those with a budget, in order) as their scores come in.

    kept: entries per KV head on average. heads: KV heads of every layer. Rules inside a layer are done with it at once; rules that share
    entries among layers hold candidates, and `add` may take some of an earlier layer's away again, always from the end of a head's order.
    words: the document's, for methods that pool by them; without, every token is one. standing [n]: for methods that read twice.
    """

    def __init__(
        self,
        method: Method,
        kept: int,
        heads: Sequence[int],
        n: int,
        words: Words | None = None,
        standing: Tensor | None = None,
    ) -> None:
        self.method, self.kept, self.heads, self.n = method, kept, tuple(heads), n
        self.forced = method.forced(n)
        self._done: list[Kept] = []
        self._shared: BestSoFar | SharedLayers | TwoOrders | None = None
        self._orders: Orders | None = None
        if self.heads and method.rule == "model-wide":  # also where all is kept: admit is a matter of all layers
            self._shared = BestSoFar(kept, n, self.forced, sum(self.heads), method.alpha)
        if self.heads and method.together is not None:
            self._shared = TwoOrders(kept, n, self.forced, sum(self.heads), method.alpha, method.together.heads)
            self._orders = Orders(method.together, method.pool, words, standing)
        if kept < n and method.rule == "cake-layers":
            self._shared = SharedLayers(kept, n, self.forced, len(self.heads))

    def add(self, scores: LayerScores) -> Kept:
        """The next layer's scores -> what is held of it, in file order; final unless the rule is one that shares."""
        if self._shared is None:
            self._done.append(self._inside(scores))
            return self._done[-1]
        if isinstance(self._shared, TwoOrders):
            assert self._orders is not None
            self._shared.add(*self._orders.add(scores))
            return self._shared.newest()
        ranked = self.method.comparable(scores, self.kept, self.forced)
        if isinstance(self._shared, BestSoFar):
            self._shared.add(ranked, scores.raw)
        else:
            self._shared.add(ranked, scores.raw, preference(scores, len(self.forced), self.n))
        return self._shared.candidates()[-1]

    @property
    def shares(self) -> bool:
        """Whether layers share entries, so that `held` changes."""
        return self._shared is not None

    def held(self) -> list[list[int]]:
        """Entries of every head of every layer so far that are still held."""
        if isinstance(self._shared, TwoOrders):
            return self._shared.held()
        counts = [kept.counts for kept in (self._done if self._shared is None else self._shared.candidates())]
        every = iter(torch.cat(counts).tolist() if counts else ())  # the device is asked once
        return [[next(every) for _ in own] for own in counts]

    def finish(self) -> list[Kept]:
        """The kept entries of every layer in file order: the first of what was held."""
        return self._done if self._shared is None else self._shared.finish()

    def _inside(self, scores: LayerScores) -> Kept:
        method = self.method
        rule = method.rule if method.rule in ("head-adaptive", "model-wide") else "uniform"
        count = self.kept
        if method.rule == "layer-pyramid":
            count = pyramid_counts(self.kept, self.n, len(self.forced), len(self.heads))[len(self._done)]
        chosen = None
        if not method.recent_half and not method.two_stages and method.ranked is None:
            chosen = select_on_gpu(scores.raw, count, method.pool, self.forced, rule, method.alpha)
        if chosen is None:
            ranked = method.comparable(scores, self.kept, self.forced)
            if method.recent_half:
                return recent_half(scores.raw if method.pool is None else ranked, self.kept)
            if method.two_stages:
                second = second_stage(ranked, scores)
                return two_stages(
                    ranked, second, self.kept, forced=self.forced, rule=rule, alpha=method.alpha, unpooled=scores.raw
                )
            chosen = select(ranked, count, forced=self.forced, rule=rule, alpha=method.alpha, unpooled=scores.raw)
        if count > self.kept:  # no budget that a file knows admits these alone
            return Kept(chosen.positions, chosen.admit.clamp(max=self.kept), chosen.counts)
        return chosen


def second_stage(pooled: Tensor, scores: LayerScores) -> Tensor:
    """CriticalKV's score of stage 2 [..., kv_heads, n]: (pooled p + 1e-4) * mean ||v W_O^h||_1."""
    assert scores.beside is not None
    return (pooled + STAGE_TWO_EPS) * scores.beside[0]


def preference(scores: LayerScores, forced: int, n: int) -> float:
    """CAKE's share of a layer before normalising: the entropy of the window's attention times the sum of its variances, without the last
    `forced` columns. Both in float64: long documents have small terms."""
    return preferences(scores, forced, n)[0]


def preferences(scores: LayerScores, forced: int, n: int) -> list[float]:
    """`preference` of several layers, beside [2, layers, kv_heads, n]."""
    assert scores.beside is not None
    terms = scores.beside[..., : n - forced].double().sum((-2, -1)).view(2, -1)
    entropy, variance = terms.clamp(min=0).tolist()
    return [one * other for one, other in zip(entropy, variance, strict=True)]
