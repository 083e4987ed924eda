"""A budget by two orders: a part of every head's by the head's own order, the rest by one order that the heads of all layers share.

A count c of entries per head keeps the first floor(c) = max(forced, floor(alpha c)) of every head in its own order, and of all others the
first heads * (c - floor(c)) in the shared order. A larger count takes more of both, so kept sets are nested and every entry has one `admit`.
Only the `share` of all heads with the highest level have a part in the shared order; the others' entries come behind all of theirs.

No layer's scores are held whole: only entries that can still be kept are candidates (dropkv.contest). A layer that comes in is cut at once by
what was known when all were last looked at, and all are looked at again when SLACK times as many are held as that left. A GPU is waited for
once a layer, and once more where all are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.budgets import Kept, floor_of
from dropkv.candidates import Candidates, sent
from dropkv.contest import Contest, by_level, hold, steps
from dropkv.paired import TOP, paired

SLACK = 1.0625  # every cut copies keys and values


class TwoOrders:
    """The candidates of the layers so far. heads: KV heads of all layers to come; share: of them, 0 for all; kept, forced, alpha as above.

    A head's candidates are those that its own order keeps in any case, in that order, and then others by the shared one.
    """

    def __init__(self, kept: int, n: int, forced: Sequence[int], heads: int, alpha: float, share: float = 0.0) -> None:
        self.kept, self.n, self.forced, self.heads, self.alpha = kept, n, tuple(forced), heads, alpha
        self.sharing = sharing_heads(share, heads)
        self._floor = int(floor_of(kept, len(self.forced), alpha))
        self._places = heads * (kept - self._floor)
        self._all = self.sharing * (n - self._floor) < self._places  # heads without a part get something
        self._held = Candidates()
        self._levels: list[float] = []
        self._contest: Contest | None = None
        self._left = 0  # candidates when all were last looked at
        self._always: Tensor | None = None

    def add(self, own: Tensor, shared: Tensor, ties: Tensor, level: Tensor) -> None:
        """The next layer: scores float32 [kv_heads, n] of the own and of the shared order, what settles ties of both, and level [kv_heads]."""
        order = self._order(own, shared, ties)
        first = shared.gather(1, order)
        levels, counts = self._look(first, level.double())
        self._levels += levels
        self._held.add(counts, order, first, ties.gather(1, order))
        if self._places and not self._all and len(self._held) > SLACK * self._left:
            counts, self._contest = hold(self._held, self._levels, self._floor, self._places, self.sharing, self.heads)
            self._held.cut(counts)
            self._left = len(self._held)

    def candidates(self) -> list[Kept]:
        """What every layer so far may still keep; what is cut off later is the end of a head. Places in the heads stand for `admit`."""
        return [self._held.of_layer(layer) for layer in range(len(self._held.layers))]

    def newest(self) -> Kept:
        """The same of the layer that came last."""
        return self._held.of_layer(-1)

    def held(self) -> list[list[int]]:
        """How many candidates every head of every layer so far has."""
        return self._held.held()

    def finish(self) -> list[Kept]:
        """The kept entries of all layers in file order, with their places among the candidates (`Kept.order`)."""
        held, device = self._held, self._held.positions.device
        head, place = held.heads()
        inside = set(by_level(self._levels)[: self.sharing])
        outside = sent([one not in inside for one in range(len(self._levels))], device, torch.uint8)[head]
        order = torch.sort(head * self.n + held.positions, stable=True).indices
        for key in (~paired(held.first, held.second), outside):  # radix sorts: rising and stable
            order = order[torch.sort(key[order], stable=True).indices]
        free = place[order] >= self._floor
        order = order[~free | (free.cumsum(0) <= self._places)]  # what is kept, in the shared order
        line = torch.arange(1, self.kept + 1, device=device)
        floors = torch.as_tensor(floor_of(line, len(self.forced), self.alpha))
        own, head = place[order].clamp(max=self._floor), head[order]
        sure_from = torch.searchsorted(floors, own, right=True) + 1
        admit = admits(sure_from, self.heads * (line - floors).clamp(min=0))
        # by head and admit; what its own order admits comes first, in that order
        key = (head * (self.kept + 1) + admit) * (self.n + 1) + torch.where(sure_from <= admit, own, self.n)
        into = torch.sort(key, stable=True).indices
        return self._by_layer(order[into], admit[into], head)

    def _by_layer(self, chosen: Tensor, admit: Tensor, head: Tensor) -> list[Kept]:
        """Kept entries by layer, from their numbers among all candidates; head: of each, in any order."""
        held = self._held
        kept = torch.bincount(head, minlength=len(held.counts))
        counts = torch.split(kept, held.layers)
        sizes = torch.stack([own.sum() for own in counts]).tolist()
        found, start = [], 0
        parts = zip(torch.split(chosen, sizes), torch.split(admit, sizes), counts, held.held(), strict=True)
        for numbers, own_admit, own_counts, candidates in parts:
            found.append(Kept(held.positions[numbers], own_admit, own_counts, numbers - start))
            start += sum(candidates)
        return found

    def _order(self, own: Tensor, shared: Tensor, ties: Tensor) -> Tensor:
        """A layer's positions [kv_heads, n]: the `floor` that its own order keeps in any case, in that order, then all others by the shared one."""
        keys = paired(shared, ties)
        if self._floor:
            best = paired(own, ties)
            if self.forced:
                if self._always is None or self._always.device != own.device:
                    self._always = sent(list(self.forced), own.device)
                best[:, self._always] = TOP - torch.arange(len(self.forced), device=own.device)
            sure = torch.sort(best, dim=1, descending=True, stable=True).indices[:, : self._floor]
            keys.scatter_(1, sure, (TOP - torch.arange(self._floor, device=own.device)).expand_as(sure))
        return torch.sort(keys, dim=1, descending=True, stable=True).indices

    def _look(self, first: Tensor, level: Tensor) -> tuple[list[float], list[int]]:
        """The levels of a new layer's heads, and how many of its entries, in order, can still be kept by what is known of earlier layers."""
        heads, n = first.shape
        if self._contest is None:
            return level.tolist(), [n if self._places else self._floor] * heads
        reached = (first[:, self._floor :] >= self._contest.bar(level).unsqueeze(1)).sum(1)
        levels, counts = torch.stack([level, reached.double()]).tolist()
        return levels, [self._floor + int(count) for count in counts]


def sharing_heads(share: float, heads: int) -> int:
    """How many of all heads have a part in the shared order; a share of 0 means all."""
    return max(1, round(share * heads)) if share else heads


def most_held(kept: int, n: int, forced: int, layers: Sequence[int], alpha: float, share: float) -> int:
    """Candidates when most of them are held, where all heads score alike; layers: the KV heads of each."""
    heads = sum(layers)
    sharing = sharing_heads(share, heads)
    floor = int(floor_of(kept, forced, alpha))
    places, most, so_far = heads * (kept - floor), 0, 0
    if sharing * (n - floor) < places:
        return heads * n
    for own in layers:
        so_far += own
        sure = sharing - (heads - so_far)
        left = so_far * floor
        for start, stop in steps(min(sharing, so_far), sure):
            left += (stop - start) * min(n - floor, places // max(start + 1, sure))
        most = max(most, left)
    return min(heads * n, int(SLACK * most))


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
