"""What every method keeps at every budget, as masks, for all layers of a document at once.

The same sets as `Method.choose`, which goes layer by layer and puts them in file order: a test compares them for every method. Here nothing
needs an order, so a budget is a comparison of ranks, and a GPU does a document's layers in a few operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.budgets import Kept, floor_of, head_order, inverse, kept_count, layer_ranks
from dropkv.layer_budgets import pyramid_counts, share_counts
from dropkv.methods import Method
from dropkv.methods._choice import preferences, second_stage
from dropkv.methods._layer import LayerScores
from dropkv.words import Words


class Masks:
    """Kept sets of one method over the layers that have a budget; every layer has the same KV heads. words: the document's."""

    def __init__(self, method: Method, layers: Sequence[LayerScores], words: Words | None = None) -> None:
        self.method, self.words = method, words
        self.layers = tuple(layers)
        self.raw = torch.stack([scores.raw for scores in layers]).float()  # [layers, kv_heads, n]
        beside = [scores.beside for scores in layers if scores.beside is not None]
        self.scores = LayerScores(self.raw, torch.stack(beside, 1) if beside else None)
        self.forced = method.forced(self.raw.shape[2])
        self._ranks: tuple[Tensor, Tensor] | None = None

    def keep(self, budget: float | int) -> Tensor:
        """bool [layers, kv_heads, n]."""
        method, n = self.method, self.raw.shape[2]
        kept = n if method.keeps_all else kept_count(budget, n, len(self.forced))
        if kept >= n:
            return torch.ones_like(self.raw, dtype=torch.bool)
        if method.together is not None:  # whose candidates are the same at every budget, so there is no shorter way
            return mask_of(method.choose(self.layers, budget, self.words), self.raw.shape, self.raw.device)
        if method.recent_half:
            return self._recent_half(kept)
        if method.two_stages:
            return self._two_stages(kept)
        return self._by_rank(kept)

    def _by_rank(self, kept: int) -> Tensor:
        method, n, layers = self.method, self.raw.shape[2], self.raw.shape[0]
        in_head, among = self._ranked(kept)
        if method.rule in ("layer-pyramid", "cake-layers"):
            if method.rule == "layer-pyramid":
                counts = pyramid_counts(kept, n, len(self.forced), layers)
            else:
                counts = share_counts(preferences(self.scores, len(self.forced), n), kept, n, len(self.forced))
            return in_head < torch.tensor(counts, device=self.raw.device).view(-1, 1, 1)
        if method.rule == "uniform":
            return in_head < kept
        floor = int(floor_of(kept, len(self.forced), method.alpha))
        groups = among.reshape(1 if method.rule == "model-wide" else layers, -1)
        sure = in_head.reshape(groups.shape) < floor
        places = groups.shape[1] // n * (kept - floor)
        # by rank, how many of those that no floor keeps have come so far
        free = torch.zeros(groups.shape, dtype=torch.int32, device=groups.device).scatter_(1, groups, (~sure).int())
        return (sure | (free.cumsum(1, dtype=torch.int32).gather(1, groups) <= places)).view(self.raw.shape)

    def _recent_half(self, kept: int) -> Tensor:
        scores = (self.raw if self.method.pool is None else self.method.pooled(self.raw)).clone()
        scores[..., self.raw.shape[2] - (kept + 1) // 2 :] = torch.inf
        return inverse(torch.sort(scores, dim=-1, descending=True, stable=True).indices) < kept

    def _two_stages(self, kept: int) -> Tensor:
        """The budgets of the heads by the rule, half of each by rank, the rest by the second stage's score."""
        in_head, _ = self._ranked(kept)
        counts = self._by_rank(kept).sum(-1, keepdim=True)
        first = in_head < (counts // 2).clamp(min=len(self.forced)).minimum(counts)
        pooled = self.method.pooled(self.raw)
        level = torch.where(first, torch.inf, second_stage(pooled, self.scores).double())
        order = head_order(level.flatten(0, 1), (), self.raw.flatten(0, 1))
        return inverse(order).view(self.raw.shape) < counts

    def _ranked(self, kept: int) -> tuple[Tensor, Tensor]:
        """Ranks [layers, kv_heads, n] inside the head, and among all that share a budget (the layer, or the model)."""
        if self._ranks is not None:
            return self._ranks
        method, shape = self.method, self.raw.shape
        pooled = method.comparable(self.scores, kept, self.forced).flatten(0, 1)
        raw = self.raw.flatten(0, 1)
        in_head = inverse(head_order(pooled, self.forced, raw)).view(shape)
        among = in_head
        if method.rule in ("head-adaptive", "model-wide"):
            groups = 1 if method.rule == "model-wide" else shape[0]
            among = layer_ranks(pooled, self.forced, raw, groups).view(shape)
        if method.ranked is None:  # otherwise the ranks belong to this budget alone
            self._ranks = (in_head, among)
        return in_head, among


def mask_of(layers: Sequence[Kept], shape: Sequence[int], device: torch.device) -> Tensor:
    """Kept entries of every layer as a mask, bool [layers, kv_heads, n]."""
    keep = torch.zeros(tuple(shape), dtype=torch.bool, device=device)
    for layer, kept in enumerate(layers):
        heads = torch.repeat_interleave(torch.arange(len(kept.counts), device=device), kept.counts)
        keep[layer][heads, kept.positions] = True
    return keep
