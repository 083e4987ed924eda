"""The cone of a query's residuals: the largest c such that some unit u has <u, r_i> >= c ||r_i|| for all candidates i.

With y_i = r_i / ||r_i|| that is max over u of min over i of <u, y_i>, which equals the distance of the origin to the convex hull of the y_i
(minimax), so it is a minimum-norm-point problem. Solver: Wolfe's active-set algorithm (P. Wolfe, "Finding the nearest point in a polytope",
Mathematical Programming 11, 1976) in float64. Every step carries its own certificate, whatever rounding did to the step: the norm of the hull
point x is an upper bound of c, the least <x / ||x||, y_i> a lower one. It stops when the two differ by TOLERANCE or the upper one is below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TOLERANCE = 1e-6  # between upper and lower bound of c
COARSE = 1e-3  # for directions that are only looked for; what they achieve is then evaluated exactly
ROUNDING = (
    1e-12  # a lower bound must exceed this to count as positive: a float64 dot product of unit vectors errs by less
)
WEIGHT = 1e-12  # corral weights below are zero
DRIFT = 1e-10  # an updated inverse that solves worse is computed anew
SINGULAR = 1e-12
IMPROVEMENT = 1e-3
TURNS = 2

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cone:
    """Bounds of the cone constant, lower <= c <= upper (cosines; lower may be negative), and the unit direction u [d] that attains `lower`.

    steps: major iterations of the solver.
    """

    lower: float
    upper: float
    direction: Tensor
    steps: int

    @property
    def certified(self) -> bool:
        """Whether a cone exists for certain: c > 0."""
        return self.lower > ROUNDING

    @property
    def constant(self) -> float:
        """c as far as it is certain: the lower bound where it is positive, else 0."""
        return self.lower if self.certified else 0.0


def unit_residuals(residuals: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals [m, d] scaled to length 1 in float64, and which of them [m] are not zero (a zero residual lies in every cone)."""
    wide = residuals.double()
    norms = wide.norm(dim=1)
    inside = norms > 0
    return wide[inside] / norms[inside].unsqueeze(1), inside


def cone_constant(points: Tensor, *, tolerance: float = TOLERANCE, limit: int = 20_000) -> Cone:
    """Bounds of max over unit u of min over i of <u, points_i>, for unit vectors `points` float64 [m, d], m >= 1."""
    corral = _Corral(points)
    x = corral.point()
    lower, direction, steps = -1.0, x / x.norm(), 0
    while True:
        upper = float(x.norm())
        if upper <= tolerance:
            break
        dots = torch.mv(points, x)
        least = int(dots.argmin())
        bound = float(dots[least]) / upper
        if bound > lower:
            lower, direction = bound, x / upper
        if upper - lower <= tolerance or steps >= limit or not corral.add(least):
            break
        x = corral.settle()
        steps += 1
    return Cone(min(lower, upper), upper, direction, steps)


class _Corral:
    """Wolfe's corral: affinely independent points with the positive weights of the hull point they span.

    Its few rows live in numpy: (1 1^T + Y Y^T) and its inverse grow and shrink by one row, so a step costs the square of their number.
    """

    def __init__(self, points: Tensor) -> None:
        self.points = points
        self.members = [0]
        self.rows = self._row(0)[None]
        self.weights = np.ones(1)
        self.gram = np.full((1, 1), 1 + float(self.rows[0] @ self.rows[0]))
        self.inverse = 1 / self.gram

    def _row(self, index: int) -> Array:
        row: Array = self.points[index].cpu().numpy()
        return row

    def point(self) -> Tensor:
        """The hull point [d]."""
        return torch.from_numpy(self.weights @ self.rows).to(self.points.device)

    def add(self, index: int) -> bool:
        """Take in a point; False when it is in already, which means that float64 can do no better."""
        if index in self.members:
            return False
        row = self._row(index)
        column, corner = 1 + self.rows @ row, 1 + float(row @ row)
        self.members.append(index)
        self.rows = np.vstack([self.rows, row])
        self.weights = np.append(self.weights, 0.0)
        self.gram = np.block([[self.gram, column[:, None]], [column[None], np.array([[corner]])]])
        solved = self.inverse @ column
        rest = corner - float(column @ solved)
        if rest < SINGULAR:
            self.inverse = np.linalg.pinv(self.gram, hermitian=True)
        else:
            border = np.append(-solved, 1.0)
            self.inverse = np.pad(self.inverse, (0, 1)) + np.outer(border, border) / rest
        return True

    def settle(self) -> Tensor:
        """Move to the least-norm point of the hull of the members, leaving out those that get no weight; gives the hull point [d]."""
        while True:
            target = self._affine_minimiser()
            falling = target <= WEIGHT
            if len(self.members) == 1 or not falling.any():
                self.weights = target
                break
            step = np.min(self.weights[falling] / np.maximum(self.weights[falling] - target[falling], 1e-300))
            moved = self.weights + min(1.0, step) * (target - self.weights)
            moved[falling & (moved <= moved[falling].min())] = 0  # the one that blocks leaves, whatever rounding says
            for position in np.flatnonzero(moved <= WEIGHT)[::-1]:
                self._remove(int(position))
            self.weights = moved[moved > WEIGHT] / moved[moved > WEIGHT].sum()
        return self.point()

    def _remove(self, position: int) -> None:
        del self.members[position]
        self.rows = np.delete(self.rows, position, 0)
        self.gram = np.delete(np.delete(self.gram, position, 0), position, 1)
        column, corner = np.delete(self.inverse[position], position), self.inverse[position, position]
        smaller = np.delete(np.delete(self.inverse, position, 0), position, 1)
        self.inverse = smaller - np.outer(column, column) / corner

    def _affine_minimiser(self) -> Array:
        """Weights (sum 1, any sign) of the least-norm point of the members' affine hull: (1 1^T + Y Y^T) b = 1, scaled."""
        solved = self.inverse.sum(1)
        if not np.allclose(self.gram @ solved, 1, rtol=0, atol=DRIFT):
            self.inverse = np.linalg.pinv(self.gram, hermitian=True)
            solved = self.inverse.sum(1)
        weights: Array = solved / solved.sum()
        return weights


def constant_at_mass(cosines: Tensor, weights: Tensor, mass: float) -> float:
    """The largest c such that candidates of at least the share `mass` of the total weight have cosine >= c; cosines and weights [m]."""
    ordered, order = cosines.sort(descending=True)
    running = weights[order].cumsum(0)
    reached = torch.searchsorted(running, running[-1] * (mass - 1e-12))
    return float(ordered[min(int(reached), len(ordered) - 1)])


def mass_inside(cosines: Tensor, weights: Tensor, constant: float) -> float:
    """mu(u, c): the share of the candidates' total weight (their attention p) whose cosine with u is at least `constant`."""
    return float(weights[cosines >= constant].sum() / weights.sum())


def approximate_cone(points: Tensor, weights: Tensor, mass: float, start: Tensor) -> tuple[float, Tensor]:
    """An approximate cone that holds the share `mass` of the weight: its constant c and its direction u [d].

    points float64 [m, d] of length 1, weights [m] the candidates' attention p, start: the direction to begin with. In turns: drop the
    offenders, those with the smallest cosines as long as they weigh no more than 1 - mass together, and take the direction of the exact
    cone of the rest. What comes out is a local optimum, so the best possible c may be larger.
    """
    best, direction, u = -1.0, start, start
    for turn in range(TURNS + 1):
        cosines = torch.mv(points, u)
        found = constant_at_mass(cosines, weights, mass)
        if turn and found < best + IMPROVEMENT:
            break
        best, direction = found, u
        if turn < TURNS:
            u = cone_constant(points[cosines >= found], tolerance=COARSE).direction
    return best, direction
