"""What is measured of one triple (layer, query head, query): its cone, its approximate cones, its factor, its gaps."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.bench.theory.cone import Cone, approximate_cone, cone_constant, mass_inside, unit_residuals
from dropkv.bench.theory.gap import Gap, exhaustive_gap, singleton_costs

MASSES = (0.99, 0.95)  # shares of candidate mass that an approximate cone must hold
CONSTANTS = (0.0, 0.05, 0.1)  # cone constants whose mass is measured
STRATA = ("random", "low-attention tail", "near threshold")
GAP_TOKENS = 20
GAP_REMOVED = 10


@dataclass(frozen=True)
class Study:
    """One sampled triple. Candidates are the keys its KV head evicts.

    eps: the largest candidate p. evicted_mass: the sum of candidate p. constants: c of the approximate cone per share in MASSES. masses: the
    largest mass found inside a cone per constant in CONSTANTS. evicted_norm, kept_norm: median ||a - v||_2 of the candidates and of the others.
    """

    layer: int
    head: int
    query: int
    candidates: int
    eps: float
    evicted_mass: float
    cone: Cone
    constants: tuple[float, ...]
    masses: tuple[float, ...]
    gaps: tuple[Gap, ...]
    evicted_norm: float
    kept_norm: float

    def factor(self, *, mass: bool = False) -> float:
        """The bound 1 / [c (1 - eps) (1 - k eps)], k = candidates; infinite without a certified cone or where k eps >= 1.

        mass: with the candidates' true mass in the place of k eps, which is never more: the proof needs only that sum. It bounds greedy
        against best among sets of candidates; that the window's evictions hold this query's own greedy and best set is not checked.
        """
        removed = self.evicted_mass if mass else self.candidates * self.eps
        if not self.cone.certified or removed >= 1:
            return float("inf")
        return 1 / (self.cone.lower * (1 - self.eps) * (1 - removed))


def study(
    layer: int, head: int, query: int, p: Tensor, residuals: Tensor, evicted: Tensor, eligible: int, rng: random.Random
) -> Study:
    """Measure a triple: p float64 [n], residuals float64 [n, d], evicted bool [n]; the first `eligible` keys may be evicted at all."""
    weights, candidates = p[evicted], residuals[evicted]
    points, nonzero = unit_residuals(candidates)
    heavy = weights[nonzero]
    exact = cone_constant(points)
    centre = torch.mv(points.T, heavy)
    centre = centre / centre.norm().clamp_min(1e-300)
    constants, directions = [], [centre, exact.direction]
    for mass in MASSES:
        constant, direction = approximate_cone(points, heavy, mass, exact.direction if exact.certified else centre)
        constants.append(max(constant, exact.constant))
        directions.append(direction)
    cosines = torch.mm(points, torch.stack(directions).T)
    masses = tuple(max(mass_inside(column, heavy, c) for column in cosines.T) for c in CONSTANTS)
    norms = residuals.norm(dim=1)
    return Study(
        layer=layer,
        head=head,
        query=query,
        candidates=len(weights),
        eps=float(weights.max()),
        evicted_mass=float(weights.sum()),
        cone=exact,
        constants=tuple(constants),
        masses=masses,
        gaps=gaps(p[:eligible], residuals[:eligible], int(evicted.sum()), rng),
        evicted_norm=float(norms[evicted].median()),
        kept_norm=float(norms[~evicted].median()),
    )


def gaps(p: Tensor, residuals: Tensor, evicted: int, rng: random.Random) -> tuple[Gap, ...]:
    """One gap per stratum, each over GAP_TOKENS of the keys that may be evicted; all other keys stay.

    random: any of them. low-attention tail: any of the half with the smallest p. near threshold: by singleton cost, the ten last that this
    query would keep and the ten first that it would evict if so many are evicted.
    """
    n = len(p)
    half = p.sort(stable=True).indices[: n // 2].tolist()
    order = singleton_costs(p, residuals).sort(descending=True, stable=True).indices
    first = min(max(0, n - evicted - GAP_TOKENS // 2), n - GAP_TOKENS)
    chosen = (
        rng.sample(range(n), GAP_TOKENS),
        rng.sample(half, GAP_TOKENS),
        order[first : first + GAP_TOKENS].tolist(),
    )
    return tuple(exhaustive_gap(p[rows], residuals[rows], GAP_REMOVED) for rows in (sorted(part) for part in chosen))
