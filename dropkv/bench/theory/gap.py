"""The gap between greedy removal and the best set, by trying all sets.

Removing a set J of keys and renormalising moves one query's output by sum_J p_j r_j / (1 - sum_J p_j), r_j = a - v_j; F(J) is its L2 norm.
Greedy removes the k keys with the smallest s_j = p_j / (1 - p_j) ||r_j|| at once (no eps).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    costs: Tensor = p / (1 - p) * residuals.norm(dim=1)
    return costs


def removal_cost(p: Tensor, residuals: Tensor, removed: Tensor) -> Tensor:
    """F of one set or of many: `removed` bool [..., n] -> [...]."""
    chosen = removed.to(p.dtype)
    moved = torch.matmul(chosen, p.unsqueeze(1) * residuals)
    costs: Tensor = moved.norm(dim=-1) / (1 - torch.matmul(chosen, p))
    return costs


def greedy_set(p: Tensor, residuals: Tensor, removed: int) -> Tensor:
    """Indices [removed], ascending, of the smallest singleton costs; ties to the earlier index."""
    order = singleton_costs(p, residuals).sort(stable=True).indices
    return order[:removed].sort().values


def exhaustive_gap(p: Tensor, residuals: Tensor, removed: int) -> Gap:
    """Greedy against the best of all C(n, removed) sets, for p float64 [n] and residuals float64 [n, d].

    p need not sum to 1: then the tokens are part of a longer text whose other keys stay, and the residuals are those of the whole text.
    """
    n = len(p)
    best = _best_set(p, p.unsqueeze(1) * residuals, removed)
    greedy = torch.zeros(n, dtype=torch.bool, device=p.device)
    greedy[greedy_set(p, residuals, removed)] = True
    f_greedy, f_best = removal_cost(p, residuals, torch.stack([greedy, best])).tolist()
    if f_greedy <= f_best:  # the same set, or equal but for rounding
        best, f_best = greedy, f_greedy
    return Gap(_indices(greedy), _indices(best), f_greedy, f_best)


def _best_set(p: Tensor, weighted: Tensor, removed: int) -> Tensor:
    """The best of all sets as bool [n]; weighted = p_j r_j [n, d].

    Every set is one of the first half's subsets and one of the second's, so all squared norms are ||x||^2 + ||y||^2 + 2 <x, y> of their sums.
    """
    n = len(p)
    cut = n // 2
    first, second = _subsets(cut).to(p.device), _subsets(n - cut).to(p.device)
    least, best = torch.inf, torch.zeros(n, dtype=torch.bool, device=p.device)
    for size in range(max(0, removed - (n - cut)), min(cut, removed) + 1):
        left, right = first[first.sum(1) == size], second[second.sum(1) == removed - size]
        x, y = torch.mm(left, weighted[:cut]), torch.mm(right, weighted[cut:])
        squared = 2 * torch.mm(x, y.T) + x.square().sum(1).unsqueeze(1) + y.square().sum(1)
        rest = (1 - torch.mv(left, p[:cut])).unsqueeze(1) - torch.mv(right, p[cut:])
        costs = squared.clamp_min(0).sqrt() / rest
        lowest = int(costs.argmin())
        if float(costs.flatten()[lowest]) < least:
            least = float(costs.flatten()[lowest])
            best = torch.cat([left[lowest // len(right)], right[lowest % len(right)]]).bool()
    return best


def _subsets(n: int) -> Tensor:
    """All subsets of n as rows of 0 and 1, float64 [2^n, n]."""
    return (torch.arange(1 << n).unsqueeze(1) >> torch.arange(n) & 1).double()


def _indices(chosen: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(chosen).squeeze(1).tolist())
