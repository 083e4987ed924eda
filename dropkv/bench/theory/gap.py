"""The gap between greedy removal and the best set, by trying all sets.

Removing a set J of keys and renormalising moves one query's output by sum_J p_j r_j / (1 - sum_J p_j), r_j = a - v_j; F(J) is its L2 norm.
Greedy removes the k keys with the smallest s_j = p_j / (1 - p_j) ||r_j|| at once (no eps).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gap:
    """Removed sets (ascending indices) and what they cost, F in the units of the values."""

    greedy: tuple[int, ...]
    best: tuple[int, ...]
    f_greedy: float
    f_best: float

    @property
    def ratio(self) -> float:
        """F(greedy) / F(best), at least 1; 1 where both are nothing, infinite where only the best is."""
        if self.f_best > 0:
            return self.f_greedy / self.f_best
        return 1.0 if self.f_greedy <= 0 else float("inf")


def singleton_costs(p: Tensor, residuals: Tensor) -> Tensor:
    """s_j [n] for p [n] and residuals [n, d]."""
    return p / (1 - p) * residuals.norm(dim=1)


def removal_cost(p: Tensor, residuals: Tensor, removed: Tensor) -> Tensor:
    """F of one set or of many: `removed` bool [..., n] -> [...]."""
    chosen = removed.to(p.dtype)
    return torch.matmul(chosen, p.unsqueeze(1) * residuals).norm(dim=-1) / (1 - torch.matmul(chosen, p))


def greedy_set(p: Tensor, residuals: Tensor, removed: int) -> Tensor:
    """Indices [removed], ascending, of the smallest singleton costs; ties to the earlier index."""
    order = singleton_costs(p, residuals).sort(stable=True).indices
    return order[:removed].sort().values


def exhaustive_gap(p: Tensor, residuals: Tensor, removed: int) -> Gap:
    """Greedy against the best of all C(n, removed) sets, for p float64 [n] and residuals float64 [n, d].

    p need not sum to 1: then the tokens are part of a longer text whose other keys stay, and the residuals are those of the whole text.
    """
    n = len(p)
    sets = _subsets(n, removed).to(p.device)
    weighted = p.unsqueeze(1) * residuals
    gram = torch.mm(weighted, weighted.T)
    squared = (torch.mm(sets, gram) * sets).sum(1)
    costs = squared.clamp_min(0).sqrt() / (1 - torch.mv(sets, p))
    best = sets[int(costs.argmin())].bool()
    greedy = torch.zeros(n, dtype=torch.bool, device=p.device)
    greedy[greedy_set(p, residuals, removed)] = True
    f_greedy, f_best = removal_cost(p, residuals, torch.stack([greedy, best])).tolist()
    if f_greedy <= f_best:  # the same set, or equal but for rounding
        best, f_best = greedy, f_greedy
    return Gap(_indices(greedy), _indices(best), f_greedy, f_best)


def _indices(chosen: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(chosen).squeeze(1).tolist())


@lru_cache(maxsize=2)
def _subsets(n: int, size: int) -> Tensor:
    """All subsets of a size as rows of 0 and 1, float64 [C(n, size), n]: 30 MB for 10 of 20."""
    chosen = torch.tensor(list(itertools.combinations(range(n), size)))
    return torch.zeros(len(chosen), n, dtype=torch.float64).scatter_(1, chosen, 1)
