"""What every method keeps at every budget, as masks, for all layers of some documents at once.

The same sets as `Method.choose`, which goes layer by layer and puts them in file order: a test compares them for every method. Here nothing
needs an order, so a budget is a comparison of ranks, and a GPU does the layers of all documents in a few operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.budgets import Kept, floor_of, head_order, inverse, kept_count, layer_ranks, order_of
from dropkv.layer_budgets import pyramid_counts, share_counts
from dropkv.methods import Method
from dropkv.methods._base import Together
from dropkv.methods._choice import preferences, second_stage
from dropkv.methods._layer import LayerScores
from dropkv.methods._together import Orders
from dropkv.two_orders import sharing_heads
from dropkv.words import Words


class Masks:
    """Kept sets of one method over the layers that have a budget; every layer has the same KV heads.

    documents: the KV heads are those of so many documents, one document after another; their layers become those of one document after another.
    words: each document's, for methods that need them; without, every token is one.
    """

    def __init__(
        self, method: Method, layers: Sequence[LayerScores], documents: int = 1, words: Sequence[Words] = ()
    ) -> None:
        self.method, self.words = method, words
        self.documents = documents
        self.raw = self._apart(torch.stack([scores.raw for scores in layers]).float())  # [all layers, kv_heads, n]
        beside = [scores.beside for scores in layers if scores.beside is not None]
        self.scores = LayerScores(self.raw, self._apart(torch.stack(beside, 1)) if beside else None)
        self.forced = method.forced(self.raw.shape[2])
        self._ranks: tuple[Tensor, Tensor] | None = None

    def _apart(self, x: Tensor) -> Tensor:
        """[..., layers, all heads, n] -> [..., all layers, heads, n]."""
        by_document = x.view(*x.shape[:-2], self.documents, -1, x.shape[-1]).transpose(-4, -3)
        return by_document.flatten(-4, -3)

    def keep(self, budget: float | int) -> Tensor:
        """bool [all layers, kv_heads, n]."""
        method, n = self.method, self.raw.shape[2]
        kept = n if method.keeps_all else kept_count(budget, n, len(self.forced))
        if kept >= n:
            return torch.ones_like(self.raw, dtype=torch.bool)
        if method.recent_half:
            return self._recent_half(kept)
        if method.two_stages:
            return self._two_stages(kept)
        return self._by_rank(kept)

    def _by_rank(self, kept: int) -> Tensor:
        method, n, layers = self.method, self.raw.shape[2], self.raw.shape[0] // self.documents
        in_head, among = self._ranked(kept)
        if method.rule in ("layer-pyramid", "cake-layers"):
            if method.rule == "layer-pyramid":
                counts = pyramid_counts(kept, n, len(self.forced), layers) * self.documents
            else:
                shares = preferences(self.scores, len(self.forced), n)
                each = (shares[first : first + layers] for first in range(0, len(shares), layers))
                counts = [count for own in each for count in share_counts(own, kept, n, len(self.forced))]
            return in_head < torch.tensor(counts, device=self.raw.device).view(-1, 1, 1)
        if method.rule == "uniform":
            return in_head < kept
        floor = int(floor_of(kept, len(self.forced), method.alpha))
        groups = among.reshape(self._groups, -1)
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

    @property
    def _groups(self) -> int:
        """How many times a budget is shared: a layer's, or a document's."""
        return self.documents if self.method.rule in ("model-wide", "two orders") else len(self.raw)

    def _ranked(self, kept: int) -> tuple[Tensor, Tensor]:
        """Ranks [layers, kv_heads, n] inside the head, and among all that share a budget (the layer, or the model)."""
        if self._ranks is not None:
            return self._ranks
        if self.method.together is not None:
            self._ranks = self._two_orders(self.method.together)
            return self._ranks
        method, shape = self.method, self.raw.shape
        pooled = method.comparable(self.scores, kept, self.forced).flatten(0, 1)
        raw = self.raw.flatten(0, 1)
        in_head = inverse(head_order(pooled, self.forced, raw)).view(shape)
        among = in_head
        if method.rule in ("head-adaptive", "model-wide"):
            among = layer_ranks(pooled, self.forced, raw, self._groups).view(shape)
        if method.ranked is None:  # otherwise the ranks belong to this budget alone
            self._ranks = (in_head, among)
        return in_head, among

    def _two_orders(self, together: Together) -> tuple[Tensor, Tensor]:
        """Ranks in the own order of every head, and in the order that the heads of a document share: what `TwoOrders` chooses by."""
        shape, heads = self.raw.shape, self.raw.shape[0] // self.documents * self.raw.shape[1]
        assert self.scores.beside is not None
        parts = zip(self.raw.chunk(self.documents), self.scores.beside.chunk(self.documents, 1), strict=True)
        words = list(self.words) or [Words.alone(self.raw.shape[2], self.raw.device)] * self.documents
        made = []
        for (raw, beside), own in zip(parts, words, strict=True):
            standing = beside[0].mean(1).mean(0) if self.method.reads_twice else None
            made.append(Orders(together, self.method.pool, own, standing).add_all(LayerScores(raw, beside)))
        own_order, shared, _, level = (torch.cat(one) for one in zip(*made, strict=True))
        place = inverse(head_order(own_order.flatten(0, 1), self.forced, self.raw.flatten(0, 1))).view(shape)
        by_level = torch.sort(level.double().view(self.documents, heads), descending=True, stable=True).indices
        sharing = sharing_heads(together.heads, heads)
        outside = (inverse(by_level) >= sharing).view(*shape[:2], 1).expand(shape)
        # the heads that share come first
        order = order_of(shared.view(self.documents, -1), self.raw.view(self.documents, -1))
        behind = outside.reshape(self.documents, -1).gather(1, order).byte()
        order = order.gather(1, torch.sort(behind, dim=1, stable=True).indices)
        return place, inverse(order).view(shape)


def mask_of(layers: Sequence[Kept], shape: Sequence[int], device: torch.device) -> Tensor:
    """Kept entries of every layer as a mask, bool [layers, kv_heads, n]."""
    keep = torch.zeros(tuple(shape), dtype=torch.bool, device=device)
    for layer, kept in enumerate(layers):
        heads = torch.repeat_interleave(torch.arange(len(kept.counts), device=device), kept.counts)
        keep[layer][heads, kept.positions] = True
    return keep
