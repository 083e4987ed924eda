"""Budgets: how many entries are kept, which ones, and in which order they stand in a file (METHODS section 3).

Order inside a head: the forced entries first (newest first), then by pooled score, ties by unpooled score, then the earlier position.
Under the rules here the kept sets are nested in the budget, so every entry has one `admit`: the smallest kept count whose set holds it.
Rules that share entries among layers are in layer_budgets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.errors import BudgetError, UsageError

RULES = ("uniform", "head-adaptive", "model-wide")
ADMIT_ELEMENTS = 1 << 24  # of one part of the count of better entries, 128 MiB
ROUNDING = 1e-9  # a fraction such as 0.29 * 100 must not floor one entry low


@dataclass(frozen=True)
class Kept:
    """The kept entries of one layer, head after head in file order (ascending admit): int64 positions [entries] and admit [entries],
    and how many each KV head has [kv_heads]. order: their places among the entries held so far, where these stood in another order."""

    positions: Tensor
    admit: Tensor
    counts: Tensor
    order: Tensor | None = None


def kept_count(budget: float | int, n: int, forced: int) -> int:
    """Entries per KV head of an n-token document: floor(budget * n) or the whole number, at least the forced ones, at most n."""
    return max(1, min(forced, n), min(_asked(budget, n), n))


def counted_entries(count: int) -> str:
    """A number of entries in words."""
    return "1 entry" if count == 1 else f"{count} entries"


def check_forced(budget: float | int, n: int, forced: int, shown: str = "") -> None:
    """Raise BudgetError when the budget asks for fewer entries than are always kept (a document shorter than those keeps everything).

    shown: the document's name for the message.
    """
    asked = _asked(budget, n)
    least = min(forced, n)
    if asked < least:
        where = f"{shown}: " if shown else ""
        raise BudgetError(
            f"{where}budget {budget} is {counted_entries(asked)} per head of {n} tokens, fewer than the {least} that are always kept: "
            f"use --budget {least} or more, or 1.0 to keep everything"
        )


def _asked(budget: float | int, n: int) -> int:
    """Entries a budget asks for, before any bound: a whole number as it is, a fraction of n rounded down."""
    return budget if isinstance(budget, int) else int(budget * n + ROUNDING)


def forced_positions(n: int, first: int, last: int) -> list[int]:
    """Positions that are always kept, newest first: the last `last` and the first `first` of n."""
    return sorted(set(range(max(0, n - last), n)) | set(range(min(first, n))), reverse=True)


def kept(
    scores: Tensor,
    count: int,
    *,
    forced: int | Sequence[int] = 0,
    rule: str = "uniform",
    alpha: float = 0.2,
    unpooled: Tensor | None = None,
) -> list[Tensor]:
    """Kept positions, one sorted int64 tensor per KV head, for scores [kv_heads, n] and `count` entries per head (on average).

    forced: how many of the newest entries are always kept, or the positions that are. unpooled [kv_heads, n] breaks ties of pooled scores.
    """
    chosen = select(scores, count, forced=forced, rule=rule, alpha=alpha, unpooled=unpooled)
    return [part.sort().values for part in torch.split(chosen.positions, chosen.counts.tolist())]


def select(
    scores: Tensor,
    count: int,
    *,
    forced: int | Sequence[int] = 0,
    rule: str = "uniform",
    alpha: float = 0.2,
    unpooled: Tensor | None = None,
) -> Kept:
    """The kept entries of a layer in file order, for scores [kv_heads, n]. Arguments as in `kept`.

    uniform: the first `count` of every head. head-adaptive: every head keeps its first max(forced, floor(alpha * count)), the remaining
    places of kv_heads * count go to the layer's best scores (the rule of NVIDIA/kvpress for AdaKV, arXiv 2407.11550). model-wide: the
    same with alpha 0; the rows are the heads of all layers, the lower layer first. Raises UsageError for an unknown rule.
    """
    if rule not in RULES:
        raise UsageError(f"unknown budget rule {rule!r}: use one of {', '.join(RULES)}")
    if rule == "model-wide":
        alpha = 0.0
    heads, n = scores.shape
    always = (
        forced_positions(n, 0, forced)
        if isinstance(forced, int)
        else sorted({p for p in forced if p < n}, reverse=True)
    )
    count = max(1, len(always), min(count, n))
    order = head_order(scores, always, unpooled)
    if rule == "uniform" or count >= n:
        chosen = order[:, :count]
        counts = torch.full((heads,), chosen.shape[1], device=scores.device)
        if rule == "uniform":
            return Kept(
                chosen.reshape(-1), torch.arange(1, chosen.shape[1] + 1, device=scores.device).repeat(heads), counts
            )
    ranks = layer_ranks(scores, always, unpooled).gather(
        1, order
    )  # [heads, n]: the layer-wide rank of each head's r-th entry
    counts = adaptive_counts(ranks, count, len(always), alpha)
    inside = torch.arange(n, device=scores.device) < counts.unsqueeze(1)
    return Kept(order[inside], adaptive_admit(ranks, inside, count, len(always), alpha), counts)


def head_order(scores: Tensor, always: Sequence[int], unpooled: Tensor | None) -> Tensor:
    """Positions [heads, n] in the order a growing budget takes them, head by head."""
    return order_of(*_keys(scores, always, unpooled))


def layer_ranks(scores: Tensor, always: Sequence[int], unpooled: Tensor | None, groups: int = 1) -> Tensor:
    """Rank [heads, n] of every entry among all of the layer: the same keys as `head_order`, ties to the lower head, the earlier position.

    groups: the heads are those of so many layers, one after the other, and an entry is ranked among its own layer's.
    """
    first, second = (key.reshape(groups, -1) for key in _keys(scores, always, unpooled))
    return inverse(order_of(first, second)).reshape(scores.shape)


def inverse(order: Tensor) -> Tensor:
    """The rank of every entry from the order of the entries, along the last dimension."""
    line = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, line)


def order_of(first: Tensor, second: Tensor) -> Tensor:
    """Indices [rows, n] by falling first key, then falling second key, then rising index."""
    order = torch.sort(second, dim=1, descending=True, stable=True).indices
    return order.gather(1, torch.sort(first.gather(1, order), dim=1, descending=True, stable=True).indices)


def _keys(scores: Tensor, always: Sequence[int], unpooled: Tensor | None) -> tuple[Tensor, Tensor]:
    first = _sortable(scores)
    second = torch.zeros_like(first) if unpooled is None else _sortable(unpooled)
    if always:
        index = torch.tensor(list(always), device=scores.device)
        first, second = first.clone(), second.clone()
        first[:, index] = torch.inf
        second[:, index] = index.to(second.dtype)  # newest first
    return first, second


def _sortable(x: Tensor) -> Tensor:
    """Keys that are compared exactly; float32 sorts in half the time, and holds every position up to 2^24."""
    return x if x.dtype == torch.float32 and x.shape[-1] <= 1 << 24 else x.double()


def floor_of(count: Tensor | int, forced: int, alpha: float) -> Tensor | int:
    """Entries every head keeps whatever the others score: max(forced, floor(alpha * count))."""
    if isinstance(count, int):
        return max(forced, min(count, int(alpha * count + ROUNDING)))
    share = (alpha * count.double() + ROUNDING).long().minimum(count)
    return share.clamp(min=forced)


def adaptive_counts(ranks: Tensor, count: int, forced: int, alpha: float) -> Tensor:
    """Entries per head [heads] when kv_heads * count places are shared; ranks [heads, n] are layer-wide ranks, ascending within a head."""
    heads, n = ranks.shape
    floor = int(floor_of(count, forced, alpha))
    rest = ranks[:, floor:].reshape(-1)
    places = heads * (count - floor)
    counts = torch.full((heads,), floor, device=ranks.device)
    if places >= rest.numel():
        return torch.full((heads,), n, device=ranks.device)
    if places:
        limit = rest.kthvalue(places).values
        counts += (ranks[:, floor:] <= limit).sum(1)
    return counts


def adaptive_admit(ranks: Tensor, inside: Tensor, count: int, forced: int, alpha: float) -> Tensor:
    """admit int64 [entries] of the entries marked by `inside` [heads, n], in that order: the smallest count whose kept set holds each.

    At a count c an entry of in-head rank r is kept if r < floor(c), or if fewer than heads * (c - floor(c)) entries outside the floors rank
    before it. Kept sets are nested, so the smallest c is found by bisection for all entries at once. Ranks of entries outside the set at
    `count` do not matter: where one of them ranks before a kept entry, so do as many kept ones as there are places.
    """
    heads, n = ranks.shape
    in_head = torch.arange(n, device=ranks.device).expand(heads, n)[inside]
    mine = ranks[inside].contiguous()
    size = max(1, ADMIT_ELEMENTS // heads)
    parts = [
        _admit(ranks, part, place, count, forced, alpha)
        for part, place in zip(torch.split(mine, size), torch.split(in_head, size), strict=True)
    ]
    return torch.cat(parts)


def _admit(ranks: Tensor, mine: Tensor, in_head: Tensor, count: int, forced: int, alpha: float) -> Tensor:
    heads = len(ranks)
    before = torch.stack(
        [torch.searchsorted(row.contiguous(), mine) for row in ranks]
    )  # [heads, entries] better entries of each head
    low = torch.ones_like(mine)
    high = torch.full_like(mine, count)
    while bool((low < high).any()):
        middle = (low + high) // 2
        floor = torch.as_tensor(floor_of(middle, forced, alpha))
        ahead = (before - floor).clamp(min=0).sum(0)
        holds = (in_head < floor) | (ahead < heads * (middle - floor))
        high = torch.where(holds, middle, high)
        low = torch.where(holds, low, middle + 1)
    return high


def recent_half(scores: Tensor, count: int) -> Kept:
    """The kept entries of a layer in file order when the newest half, rounded up, is kept whatever its score (H2O); scores [kv_heads, n].

    With every odd count the next newest entry is admitted, with every even one the best that is left; where the next newest one is in
    already, the best comes in its place. So every count's set is the one that this count alone would give.
    """
    heads, n = scores.shape
    count = max(1, min(count, n))
    chosen = []
    for best in torch.sort(scores, dim=1, descending=True, stable=True).indices.tolist():
        taken: set[int] = set()
        order = []
        ranked = iter(best)
        for number in range(1, count + 1):
            entry = n - (number + 1) // 2
            if number % 2 == 0 or entry in taken:
                entry = next(position for position in ranked if position not in taken)
            taken.add(entry)
            order.append(entry)
        chosen.append(order)
    positions = torch.tensor(chosen, device=scores.device)
    admit = torch.arange(1, count + 1, device=scores.device).repeat(heads)
    return Kept(positions.reshape(-1), admit, torch.full((heads,), count, device=scores.device))


def two_stages(
    pooled: Tensor,
    second: Tensor,
    count: int,
    *,
    forced: Sequence[int],
    rule: str = "uniform",
    alpha: float = 0.2,
    unpooled: Tensor | None = None,
) -> Kept:
    """The kept entries of a layer when half of each head's budget goes by `pooled` and the rest by `second`, both [kv_heads, n] (CriticalKV).

    A head's budget b is what `rule` gives it for `pooled`; the first stage takes the forced entries and up to floor(b / 2) in all. Not
    nested in the budget: admit is the entry's place in its head's order, at most `count`.
    """
    base = select(pooled, count, forced=forced, rule=rule, alpha=alpha, unpooled=unpooled)
    heads, n = pooled.shape
    always = sorted({p for p in forced if p < n}, reverse=True)
    order = head_order(pooled, always, unpooled)
    line = torch.arange(n, device=pooled.device).expand(heads, n)
    place = torch.empty_like(order).scatter_(1, order, line)
    counts = base.counts.unsqueeze(1)
    first = place < torch.maximum(counts // 2, torch.tensor(len(always), device=pooled.device)).minimum(counts)
    level = torch.where(first, torch.inf, second.double())
    tie = torch.where(first, -place.double(), (pooled if unpooled is None else unpooled).double())
    order = head_order(level, (), tie)
    inside = line < counts
    return Kept(order[inside], (line + 1).clamp(max=count)[inside], base.counts)
