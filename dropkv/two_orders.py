"""A budget by two orders: a part of every head's by the head's own order, the rest by one order that the heads of all layers share.

A count c of entries per head keeps the first floor(c) = max(forced, floor(alpha c)) of every head in its own order, and of all others the
first heads * (c - floor(c)) in the shared order. A larger count takes more of both, so kept sets are nested and every entry has one `admit`.
Only the `share` of all heads with the highest level have a part in the shared order; the others' entries come behind all of theirs.

No layer's scores are held whole: after each layer only entries that can still be kept are candidates. Who has a part is known at the end, but
a head that has one then has one all along, and so have those above it: what these put before an entry is before it for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.budgets import Kept, floor_of, head_order, inverse


@dataclass(frozen=True)
class _Held:
    """A layer's candidates, head after head, those of the own order first, then by the shared one: positions, place in the own order, the
    shared score and what settles its ties [entries]; counts and level [kv_heads]."""

    positions: Tensor
    place: Tensor
    first: Tensor
    second: Tensor
    counts: Tensor
    level: Tensor

    def only(self, keep: Tensor) -> _Held:
        """The entries marked by keep [entries]."""
        heads = torch.repeat_interleave(torch.arange(len(self.counts), device=keep.device), self.counts)
        counts = torch.bincount(heads[keep], minlength=len(self.counts))
        return _Held(self.positions[keep], self.place[keep], self.first[keep], self.second[keep], counts, self.level)


class TwoOrders:
    """The candidates of the layers so far. heads: KV heads of all layers to come; share: of them, 0 for all; kept, forced, alpha as above."""

    def __init__(self, kept: int, n: int, forced: Sequence[int], heads: int, alpha: float, share: float = 0.0) -> None:
        self.kept, self.n, self.forced, self.heads, self.alpha = kept, n, tuple(forced), heads, alpha
        self.sharing = sharing_heads(share, heads)
        self._floor = int(floor_of(kept, len(self.forced), alpha))
        self._places = heads * (kept - self._floor)
        self._layers: list[_Held] = []

    def add(self, own: Tensor, shared: Tensor, ties: Tensor, level: Tensor) -> None:
        """The next layer: scores [kv_heads, n] of the own and of the shared order, what settles ties of both, and level [kv_heads]."""
        heads, n = own.shape
        place = inverse(head_order(own, self.forced, ties))
        sure = place < self._floor
        order = head_order(torch.where(sure, torch.inf, shared), (), torch.where(sure, -place.double(), ties.double()))
        place, first, second = (part.gather(1, order).flatten() for part in (place, shared, ties))
        counts = torch.full((heads,), n, device=own.device)
        self._layers.append(_Held(order.flatten(), place, first, second, counts, level.double()))
        self._trim()

    def candidates(self) -> list[Kept]:
        """What every layer so far may still keep; trimming cuts off the end of a head."""
        return [Kept(layer.positions, layer.place, layer.counts) for layer in self._layers]

    def finish(self) -> list[Kept]:
        """The kept entries of all layers in file order, with their places among the candidates (`Kept.order`)."""
        _, head = self._heads()
        positions, place, first, second = self._joined()
        outside = self._ranks()[head] >= self.sharing
        order = torch.argsort(head * self.n + positions)
        for key in (second, first, ~outside):
            order = order[torch.sort(key[order].float(), descending=True, stable=True).indices]
        free = place[order] >= self._floor
        order = order[~free | (free.cumsum(0) <= self._places)]  # what is kept, in the shared order
        line = torch.arange(1, self.kept + 1, device=order.device)
        floors = torch.as_tensor(floor_of(line, len(self.forced), self.alpha))
        sure_from = torch.searchsorted(floors, place[order], right=True) + 1
        admit = admits(sure_from, self.heads * (line - floors).clamp(min=0))
        by_own = sure_from <= admit
        tie = torch.where(by_own, place[order], self.n + torch.arange(len(order), device=order.device))
        into = torch.argsort(tie)
        for key in (admit, head[order]):
            into = into[torch.sort(key[into], stable=True).indices]
        return self._cut(order[into], admit[into])

    def _cut(self, chosen: Tensor, admit: Tensor) -> list[Kept]:
        """Kept entries by layer, from their numbers among all candidates."""
        sizes = [len(layer.positions) for layer in self._layers]
        layer_of = torch.repeat_interleave(
            torch.arange(len(sizes), device=chosen.device), torch.tensor(sizes, device=chosen.device)
        )
        per_layer = torch.bincount(layer_of[chosen], minlength=len(sizes)).tolist()
        found, start = [], 0
        for layer, size, own, own_admit in zip(
            self._layers, sizes, torch.split(chosen, per_layer), torch.split(admit, per_layer), strict=True
        ):
            inside = own - start
            heads = torch.repeat_interleave(torch.arange(len(layer.counts), device=own.device), layer.counts)
            kept = torch.bincount(heads[inside], minlength=len(layer.counts))
            found.append(Kept(layer.positions[inside], own_admit, kept, inside))
            start += size
        return found

    def _trim(self) -> None:
        """Drop what no later layer can bring back."""
        if self.sharing * (self.n - self._floor) < self._places:
            return  # heads without a part get something, so all entries still count
        counts, head = self._heads()
        _, place, first, _ = self._joined()
        rank = self._ranks()[head]
        free = place >= self._floor
        keep = ~free
        sure = self.sharing - (self.heads - len(counts))  # so many heads have a part whatever comes
        order = torch.sort(torch.where(free, first, -torch.inf), descending=True).indices
        ranks_in_order, free_in_order = rank[order], free[order]
        start = 0
        while start < min(self.sharing, len(counts)):
            stop = min(max(start + max(1, start // 4), sure), self.sharing)
            before = (free_in_order & (ranks_in_order <= max(start, sure - 1))).cumsum(0)
            last = torch.searchsorted(before, torch.tensor([self._places], device=before.device)).clamp(
                max=len(order) - 1
            )
            least = torch.where(before[-1] > self._places, first[order[last]], -torch.inf)  # of the best so many above
            keep |= free & (rank >= start) & (rank < stop) & (first >= least) & (self._places > 0)
            start = stop
        parts = torch.split(keep, [len(layer.positions) for layer in self._layers])
        self._layers = [layer.only(part) for layer, part in zip(self._layers, parts, strict=True)]

    def _ranks(self) -> Tensor:
        """The rank of every head so far by its level; ties to the earlier."""
        level = torch.cat([layer.level for layer in self._layers])
        return inverse(torch.sort(level, descending=True, stable=True).indices)

    def _heads(self) -> tuple[Tensor, Tensor]:
        """Candidates of every head so far, and the head of every candidate."""
        counts = torch.cat([layer.counts for layer in self._layers])
        return counts, torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

    def _joined(self) -> tuple[Tensor, ...]:
        names = ("positions", "place", "first", "second")
        return tuple(torch.cat([getattr(layer, name) for layer in self._layers]) for name in names)


def sharing_heads(share: float, heads: int) -> int:
    """How many of all heads have a part in the shared order; a share of 0 means all."""
    return max(1, round(share * heads)) if share else heads


def most_held(kept: int, n: int, forced: int, layers: Sequence[int], alpha: float, share: float) -> int:
    """Candidates after the layer that leaves most of them, where all heads score alike; layers: the KV heads of each."""
    heads = sum(layers)
    sharing = sharing_heads(share, heads)
    floor = int(floor_of(kept, forced, alpha))
    places, most, so_far = heads * (kept - floor), 0, 0
    for own in layers:
        so_far += own
        if sharing * (n - floor) < places:
            return heads * n
        held, start, sure = so_far * floor, 0, sharing - (heads - so_far)
        while start < min(sharing, so_far):
            stop = min(max(start + max(1, start // 4), sure), sharing, so_far)
            held += (stop - start) * min(n - floor, places // max(start + 1, min(sure, so_far)))
            start = stop
        most = max(most, held)
    return most


def admits(sure_from: Tensor, places: Tensor) -> Tensor:
    """admit int64 [entries] of entries in their shared order, all of which the last count keeps.

    sure_from: the count from which each is kept by its head's own order. places [counts]: how many others count 1, 2, ... keeps. All entries
    are bisected at once; those still in one interval of counts are a group, and what earlier intervals have put into places is in `taken`.
    """
    most = len(places)
    low, high = torch.ones_like(sure_from), torch.full_like(sure_from, most)
    taken = torch.zeros(most + 2, dtype=torch.int64, device=places.device)
    while bool((low < high).any()):
        middle = (low + high) // 2
        needs = sure_from > middle
        group = torch.sort(low, stable=True).indices
        running = needs[group].long().cumsum(0) - needs[group].long()
        sizes = torch.unique_consecutive(low[group], return_counts=True)[1]
        begins = torch.repeat_interleave(running[sizes.cumsum(0) - sizes], sizes)
        ahead = torch.empty_like(low)
        ahead[group] = running - begins
        holds = ~needs | (ahead + taken[middle] < places[middle - 1])
        # what this count keeps has a place at the later ones of its interval too, until its head's own order keeps it
        open_ones = low < high
        stays = holds & open_ones
        end = torch.minimum(sure_from, high + 1)
        stays &= end > middle + 1
        change = torch.bincount(middle[stays] + 1, minlength=most + 2) - torch.bincount(end[stays], minlength=most + 2)
        taken += change.cumsum(0)
        high = torch.where(open_ones & holds, middle, high)
        low = torch.where(open_ones & ~holds, middle + 1, low)
    return high
