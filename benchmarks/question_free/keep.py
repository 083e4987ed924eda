"""From scores to kept sets of all layers at once: the budget rules of `dropkv.budgets` on any ranking, and some that only this bench has."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dropkv.budgets import floor_of, forced_positions, head_order, inverse, kept_count, layer_ranks


@dataclass(frozen=True)
class Rule:
    """Budgets: "head-adaptive" shares inside a layer, "model-wide" over all layers, "uniform" not at all. alpha: the part that every head has
    whatever its scores. least: entries that every head keeps, a whole number. layer_share: the part of an even share that every layer has
    before the rest is shared model-wide. first, last: entries at the document's ends that every head keeps, the template's head among the
    first."""

    name: str = "model-wide"
    alpha: float = 0.0
    least: int = 0
    layer_share: float = 0.0
    first: int = 4
    last: int = 4


class Ranking:
    """The order in which one recipe keeps entries; a budget is a comparison of ranks. pooled, raw [layers, kv_heads, n]: ties of the first
    are settled by the second; of several documents with one dimension more in front. own: what decides in place of `pooled` about the part
    that every head has (alpha, least). Kept sets stay nested: of both orders a larger budget takes more."""

    def __init__(self, rule: Rule, pooled: Tensor, raw: Tensor, own: Tensor | None = None) -> None:
        self.rule = rule
        *documents, layers, heads, n = pooled.shape
        self.shape = pooled.shape
        each = prod(documents)
        self.forced = forced_positions(n, rule.first, rule.last)
        flat, ties = pooled.reshape(-1, n), raw.reshape(-1, n)
        first = flat if own is None else own.reshape(-1, n)
        self.in_head = inverse(head_order(first, self.forced, ties))
        self.groups = each * {"uniform": layers * heads, "head-adaptive": layers, "model-wide": 1}[rule.name]
        self.among = self.in_head if rule.name == "uniform" else layer_ranks(flat, self.forced, ties, self.groups)
        self.in_layer = layer_ranks(flat, self.forced, ties, each * layers) if rule.layer_share else None

    def keep(self, budget: float | int) -> Tensor:
        """bool, in the shape of `pooled`."""
        heads, n = self.shape[-2:]
        kept = kept_count(budget, n, len(self.forced))
        if self.rule.name == "uniform":
            return (self.in_head < kept).view(self.shape)
        floor = int(floor_of(kept, max(len(self.forced), min(kept, self.rule.least)), self.rule.alpha))
        sure = self.in_head < floor
        if self.in_layer is not None:
            sure = sure | (self.in_layer < int(self.rule.layer_share * heads * kept))
        among = self.among.reshape(self.groups, -1)
        sure = sure.reshape(among.shape)
        places = among.shape[1] // n * kept - sure.sum(1, keepdim=True)
        # by rank, how many of those that are not sure have come so far
        free = torch.zeros(among.shape, dtype=torch.int32, device=among.device).scatter_(1, among, (~sure).int())
        return (sure | (free.cumsum(1, dtype=torch.int32).gather(1, among) <= places)).view(self.shape)
