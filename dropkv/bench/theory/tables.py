"""Result lines from measurements: one JSON object per row of a table. Shares are in [0, 1], angles in degrees, infinities never written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dropkv.bench.theory.cone import TOLERANCE
from dropkv.bench.theory.study import CONSTANTS, GAP_REMOVED, GAP_TOKENS, MASSES, STRATA, Study

SMALL_EPS = 0.005  # the paper's line between harmless and not
OPTIMAL = 1 + 1e-9  # F ratios up to here are equal but for rounding
ANGLE_BINS = 18  # of 5 degrees

Line = dict[str, Any]


def lines(eps: Sequence[float], studies: Sequence[Study]) -> list[Line]:
    """All rows: eps of every triple, all else of the studied ones. `paper_table` and `paper_figure` say where the paper has the same."""
    return [
        eps_line(eps),
        cone_line(studies),
        *mass_lines(studies),
        *factor_lines(studies),
        *gap_lines(studies),
        angle_line(studies),
        residual_line(studies),
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    return float(torch.tensor(list(values), dtype=torch.float64).quantile(share))


def eps_line(eps: Sequence[float]) -> Line:
    """eps: the largest p among a triple's candidates."""
    return {
        "table": "eps",
        "paper_table": 15,
        "triples": len(eps),
        **{f"p{round(100 * q)}" if q != 0.5 else "median": quantile(eps, q) for q in (0.5, 0.9, 0.95, 0.99)},
        "share_small": sum(value <= SMALL_EPS for value in eps) / len(eps),
        "small": SMALL_EPS,
    }


def cone_line(studies: Sequence[Study]) -> Line:
    """c*: certified lower bounds (0 where none is positive); the widest gap of a certified pair of bounds says how exact they are."""
    constants = [item.cone.constant for item in studies]
    positive = [value for value in constants if value > 0]
    return {
        "table": "cone",
        "paper_table": 16,
        "triples": len(studies),
        "share_positive": len(positive) / len(studies),
        "median": quantile(constants, 0.5),
        "median_positive": quantile(positive, 0.5) if positive else None,
        "p10_positive": quantile(positive, 0.1) if positive else None,
        "p90_positive": quantile(positive, 0.9) if positive else None,
        # A cone of at most the tolerance may be none; beyond it both bounds must have met.
        "share_undecided": sum(not s.cone.certified and s.cone.upper > TOLERANCE for s in studies) / len(studies),
        "widest_bounds": max((s.cone.upper - s.cone.lower for s in studies if s.cone.certified), default=None),
        "solver": "Wolfe's minimum-norm point, float64",
        "tolerance": TOLERANCE,
    }


def mass_lines(studies: Sequence[Study]) -> list[Line]:
    """Approximate cones, both ways round: c that a given share of mass allows, and mass that a given c holds. Lower bounds."""
    rows: list[Line] = []
    for index, mass in enumerate(MASSES):
        constants = [item.constants[index] for item in studies]
        rows.append(
            {
                "table": "approximate cone",
                "paper_table": 17,
                "mass": mass,
                "triples": len(studies),
                "share_positive": sum(value > 0 for value in constants) / len(studies),
                "median": quantile([max(0.0, value) for value in constants], 0.5),
            }
        )
    for index, constant in enumerate(CONSTANTS):
        masses = [item.masses[index] for item in studies]
        rows.append(
            {
                "table": "mass",
                "paper_table": 17,
                "c": constant,
                "triples": len(studies),
                "median": quantile(masses, 0.5),
                "p10": quantile(masses, 0.1),
                "share_above_95": sum(value >= 0.95 for value in masses) / len(studies),
            }
        )
    return rows


def factor_lines(studies: Sequence[Study]) -> list[Line]:
    """The bound's factor with k = evicted keys of the head, and the tighter one with their true mass in the place of k eps."""
    rows: list[Line] = []
    for mass in (False, True):
        factors = [item.factor(mass=mass) for item in studies]
        finite = [value for value in factors if math.isfinite(value)]
        rows.append(
            {
                "table": "factor",
                "paper_table": None if mass else 18,
                "removed_term": "evicted mass" if mass else "k eps",
                "k": studies[0].candidates,
                "triples": len(studies),
                "share_finite": len(finite) / len(studies),
                "median_finite": quantile(finite, 0.5) if finite else None,
                "p90_finite": quantile(finite, 0.9) if finite else None,
            }
        )
    return rows


def gap_lines(studies: Sequence[Study]) -> list[Line]:
    """F(greedy) / F(best) over all C(20, 10) sets, by stratum."""
    rows: list[Line] = []
    for index, stratum in enumerate(STRATA):
        # F(best) = 0 < F(greedy) cannot be written as a ratio; such a triple counts in share_infinite and in no quantile.
        every = [item.gaps[index].ratio for item in studies]
        ratios = [value for value in every if math.isfinite(value)]
        rows.append(
            {
                "table": "gap",
                "paper_table": 19,
                "stratum": stratum,
                "n": GAP_TOKENS,
                "removed": GAP_REMOVED,
                "triples": len(every),
                "median": quantile(ratios, 0.5) if ratios else None,
                "p95": quantile(ratios, 0.95) if ratios else None,
                "max": max(ratios, default=None),
                "share_optimal": sum(value <= OPTIMAL for value in every) / len(every),
                "share_infinite": (len(every) - len(ratios)) / len(every),
            }
        )
    return rows


def angle_line(studies: Sequence[Study]) -> Line:
    """Half-angle arccos c* of the certified cones: counts per 5 degrees from 0 to 90, and how many triples have no cone."""
    counts = [0] * ANGLE_BINS
    angles = [math.degrees(math.acos(min(1.0, s.cone.lower))) for s in studies if s.cone.certified]
    for angle in angles:
        counts[min(ANGLE_BINS - 1, int(angle * ANGLE_BINS / 90))] += 1
    return {
        "table": "angle",
        "paper_figure": 1,
        "triples": len(studies),
        "counts": counts,
        "no_cone": len(studies) - len(angles),
        "median": quantile(angles, 0.5) if angles else None,
    }


def residual_line(studies: Sequence[Study]) -> Line:
    """||a - v||_2 of evicted and of kept keys (the median of each triple) and their ratio."""
    ratios = [item.evicted_norm / item.kept_norm for item in studies if item.kept_norm > 0]
    return {
        "table": "residual",
        "paper_figure": 4,
        "triples": len(studies),
        "median_evicted": quantile([item.evicted_norm for item in studies], 0.5),
        "median_kept": quantile([item.kept_norm for item in studies], 0.5),
        "median_ratio": quantile(ratios, 0.5) if ratios else None,
    }
