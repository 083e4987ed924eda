"""Budgets that differ by layer (METHODS section 3): the layer pyramid, CAKE's shares, and one budget for all layers' heads (model-wide).

The last two need every layer's scores before anything is certain, yet never hold every layer: after each layer only entries that can still
be kept are candidates. Candidates of a head are always the first so many in its order, so trimming is cutting off the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.budgets import ROUNDING, Kept, adaptive_admit, floor_of, head_order

BETA = 20  # PyramidKV: how much less than half of the mean the top layer gets


def pyramid_counts(kept: int, n: int, forced: int, layers: int, beta: int = BETA) -> list[int]:
    """Entries per KV head of every layer, bottom first, `kept` on average: PyramidKV's arithmetic sequence over the entries not forced.

    What its integer step leaves or takes too much is settled one entry a layer, from the bottom.
    """
    if layers == 1:
        return [kept]
    own = kept - forced
    low = own // beta
    high = 2 * own - low
    if high >= n - forced:
        high = n - forced
        low = 2 * own - high
    step = (high - low) // (layers - 1)
    counts = [high - layer * step + forced for layer in range(layers)]
    missing, layer = layers * kept - sum(counts), 0
    while missing:
        one = 1 if missing > 0 else -1
        if forced <= counts[layer] + one <= n:
            counts[layer] += one
            missing -= one
        layer = (layer + 1) % layers
    return counts


def share_counts(shares: Sequence[float], kept: int, n: int, forced: int) -> list[int]:
    """Entries per KV head of every layer, `kept` on average, in proportion to `shares` >= 0 (all alike where all are 0): CAKE's layers.

    Proportional to the entries not forced, floored, at most n; what is left is handed out one entry a layer from the largest share down.
    """
    layers, room = len(shares), n - forced
    total = (kept - forced) * layers
    weight = math.fsum(shares)
    if not weight > 0:
        return [kept] * layers
    own = [min(room, int(share / weight * total + ROUNDING)) for share in shares]
    left = total - sum(own)
    order = sorted(range(layers), key=lambda layer: (-shares[layer], layer))
    while left > 0:
        open_layers = [layer for layer in order if own[layer] < room]
        rounds = min(left // len(open_layers), min(room - own[layer] for layer in open_layers))
        for layer in open_layers if rounds else open_layers[:left]:
            own[layer] += max(1, rounds)
        left = total - sum(own)
    return [count + forced for count in own]


class SharedLayers:
    """CAKE's layers as they come in: each holds what it can still get, and gets its share at the end.

    Shares only shrink while layers come in, and what capped layers leave to others is at most the mean budget for each, so a layer never ends
    with more than its share so far and that; at most twice the final entries are held.
    """

    def __init__(self, kept: int, n: int, forced: Sequence[int], layers: int) -> None:
        self.kept, self.n, self.forced, self.layers = kept, n, tuple(forced), layers
        self.shares: list[float] = []
        self._orders: list[Tensor] = []

    def add(self, scores: Tensor, unpooled: Tensor, share: float) -> None:
        """The next layer's scores [kv_heads, n] and its share, >= 0."""
        self.shares.append(share)
        self._orders.append(head_order(scores, self.forced, unpooled))
        self._orders = [order[:, :count] for order, count in zip(self._orders, self._bounds(), strict=True)]

    def candidates(self) -> list[Kept]:
        """What every layer so far may still keep, in file order."""
        return [_uniform(order, self.kept) for order in self._orders]

    def finish(self) -> list[Kept]:
        """The kept entries of all layers."""
        counts = share_counts(self.shares, self.kept, self.n, len(self.forced))
        return [_uniform(order[:, :count], self.kept) for order, count in zip(self._orders, counts, strict=True)]

    def _bounds(self) -> list[int]:
        forced, weight = len(self.forced), math.fsum(self.shares)
        total = (self.kept - forced) * self.layers
        if not weight > 0:  # nothing is known yet, except that what comes may weigh nothing too
            return [self.n] * len(self.shares)
        return [min(self.n, int(share / weight * total) + self.kept + 1) for share in self.shares]


class BestSoFar:
    """The head-adaptive rule over the heads of all layers (model-wide), as layers come in: the best so far are candidates.

    Equal to `budgets.select` on all layers' heads one after another, admit included. `heads` counts the KV heads of all layers to come.
    """

    def __init__(self, kept: int, n: int, forced: Sequence[int], heads: int, alpha: float = 0.0) -> None:
        self.kept, self.n, self.forced, self.heads, self.alpha = kept, n, tuple(forced), heads, alpha
        self._floor = int(floor_of(kept, len(self.forced), alpha))
        self._layers: list[_Ragged] = []

    def add(self, scores: Tensor, unpooled: Tensor) -> None:
        """The next layer's scores [kv_heads, n]."""
        self._layers.append(_Ragged.of(scores, unpooled, self.forced))
        best = self._ranked()
        free = [layer.place >= self._floor for layer in self._layers]
        places = self.heads * (self.kept - self._floor)
        beyond = torch.cat(free)[best].cumsum(0) > places  # in rank order; floors do not count
        keep = torch.ones_like(beyond)
        keep[best] = ~beyond
        parts = torch.split(keep, [len(layer.place) for layer in self._layers])
        self._layers = [layer.only(part | ~own) for layer, own, part in zip(self._layers, free, parts, strict=True)]

    def candidates(self) -> list[Kept]:
        """What every layer so far may still keep, in file order."""
        return [Kept(layer.positions, layer.place, layer.counts) for layer in self._layers]

    def finish(self) -> list[Kept]:
        """The kept entries of all layers."""
        best = self._ranked()
        ranks = torch.empty_like(best)
        ranks[best] = torch.arange(len(best), device=best.device)
        counts = torch.cat([layer.counts for layer in self._layers])
        width = int(counts.max())
        inside = torch.arange(width, device=best.device) < counts.unsqueeze(1)
        table = torch.full(inside.shape, 1 << 62, device=best.device)
        table[inside] = ranks
        admit = adaptive_admit(table, inside, self.kept, len(self.forced), self.alpha)
        parts = torch.split(admit, [len(layer.place) for layer in self._layers])
        return [Kept(layer.positions, part, layer.counts) for layer, part in zip(self._layers, parts, strict=True)]

    def _ranked(self) -> Tensor:
        """Indices of all candidates, best first: by score, then unpooled score, then the lower layer and head, then the earlier position."""
        first, second = (torch.cat([getattr(layer, key) for layer in self._layers]) for key in ("first", "second"))
        order = torch.sort(second, descending=True, stable=True).indices
        return order[torch.sort(first[order], descending=True, stable=True).indices]


class _Ragged:
    """A layer's candidates, head after head in each head's order: positions, place inside the head, and the two sorting keys."""

    def __init__(self, positions: Tensor, place: Tensor, first: Tensor, second: Tensor, counts: Tensor) -> None:
        self.positions, self.place, self.first, self.second, self.counts = positions, place, first, second, counts

    @classmethod
    def of(cls, scores: Tensor, unpooled: Tensor, forced: Sequence[int]) -> _Ragged:
        heads, n = scores.shape
        order = head_order(scores, forced, unpooled)
        place = torch.arange(n, device=scores.device).expand(heads, n)
        first, second = scores.double().gather(1, order), unpooled.double().gather(1, order)
        always = place < len(forced)
        first = first.masked_fill(always, torch.inf)
        second = torch.where(always, order.double(), second)
        counts = torch.full((heads,), n, device=scores.device)
        return cls(order.reshape(-1), place.reshape(-1), first.reshape(-1), second.reshape(-1), counts)

    def only(self, keep: Tensor) -> _Ragged:
        """The entries marked by keep [entries]."""
        counts = torch.stack([part.sum() for part in torch.split(keep, self.counts.tolist())])
        return _Ragged(self.positions[keep], self.place[keep], self.first[keep], self.second[keep], counts)


def _uniform(order: Tensor, kept: int) -> Kept:
    """The same number of entries for every head; admit is the place in the head's order, at most `kept`: these sets are not nested."""
    heads, count = order.shape
    admit = torch.arange(1, count + 1, device=order.device).clamp(max=kept)
    return Kept(order.reshape(-1), admit.repeat(heads), torch.full((heads,), count, device=order.device))
