"""Cones and gaps: by hand, against scipy, against the shared vectors, and one run on a tiny model."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dropkv.bench.theory import render_theory, theory_report
from dropkv.bench.theory.capture import LayerView, capture
from dropkv.bench.theory.cone import (
    approximate_cone,
    cone_constant,
    constant_at_mass,
    mass_inside,
    unit_residuals,
)
from dropkv.bench.theory.gap import exhaustive_gap, removal_cost
from dropkv.bench.theory.lines import evictions
from dropkv.bench.theory.study import gaps, study
from dropkv.documents import Document
from dropkv.errors import BudgetError, DocumentError, UsageError
from dropkv.models import Model
from tests import tiny, vectors

TEXT = "The harbour master kept the ledger in a locked drawer. Who kept the ledger? " * 6


def cloud(m: int, d: int, lift: float, seed: int) -> Tensor:
    """Random unit vectors, pushed towards one direction by `lift`."""
    made = torch.randn(m, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    made[:, 0] += lift
    return made / made.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], math.sqrt(0.5)),  # a right angle: u in the middle
        ([[1.0, 0.0], [-0.5, math.sqrt(0.75)]], 0.5),  # 120 degrees
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], 1 / math.sqrt(3)),
        ([[0.6, 0.8]], 1.0),
        ([[0.6, 0.8], [0.6, 0.8], [0.6, -0.8]], 0.6),  # twins change nothing
    ],
)
def test_cones_by_hand(points: list[list[float]], expected: float) -> None:
    found = cone_constant(torch.tensor(points, dtype=torch.float64))
    assert found.certified
    assert found.lower <= expected + 1e-12
    assert found.upper >= expected - 1e-12
    assert found.upper - found.lower <= 1e-6
    assert float(found.direction.norm()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    "points",
    [
        [[1.0, 0.0], [-1.0, 0.0]],
        [[1.0, 0.0], [-0.5, math.sqrt(0.75)], [-0.5, -math.sqrt(0.75)]],
        [[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
    ],
)
def test_no_cone_around_the_origin(points: list[list[float]]) -> None:
    found = cone_constant(torch.tensor(points, dtype=torch.float64))
    assert not found.certified
    assert found.constant == 0
    assert found.upper <= 1e-6


@pytest.mark.parametrize(
    ("m", "d", "lift", "seed"), [(12, 3, 2.0, 0), (30, 6, 3.0, 1), (60, 8, 2.5, 2), (40, 4, 0.0, 3)]
)
def test_cones_agree_with_scipy(m: int, d: int, lift: float, seed: int) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    points = cloud(m, d, lift, seed)
    y = points.numpy()
    # The same number by another way: the largest t with <u, y_i> >= t inside the unit ball.
    result = optimize.minimize(
        lambda z: -z[d],
        x0=[*y.mean(0), -1.0],
        jac=lambda z: [0.0] * d + [-1.0],
        method="SLSQP",
        constraints=[
            {"type": "ineq", "fun": lambda z: y @ z[:d] - z[d]},
            {"type": "ineq", "fun": lambda z: 1 - z[:d] @ z[:d]},
        ],
        options={"maxiter": 500, "ftol": 1e-12},
    )
    found = cone_constant(points)
    assert found.upper == pytest.approx(max(0.0, result.x[d]), abs=2e-6)
    assert found.certified == (result.x[d] > 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_certify_themselves(seed: int) -> None:
    points = cloud(400, 24, 4.0, seed)
    found = cone_constant(points)
    assert float((points @ found.direction).min()) == pytest.approx(found.lower, abs=1e-12)
    assert 0 < found.lower <= found.upper <= found.lower + 1e-6
    other = torch.randn(200, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    other /= other.norm(dim=1, keepdim=True)
    assert float((other @ points.T).amin(1).max()) <= found.upper  # no direction does better


def test_many_copies_and_near_copies_do_not_stall_the_solver() -> None:
    base = cloud(20, 8, 3.0, 5)
    noise = 1e-9 * torch.randn(10, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    points = (base + noise).reshape(-1, 8)
    points /= points.norm(dim=1, keepdim=True)
    found = cone_constant(points)
    assert found.steps < 500
    assert found.upper == pytest.approx(cone_constant(base).upper, abs=1e-6)


def test_zero_residuals_lie_in_every_cone() -> None:
    points, inside = unit_residuals(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    assert inside.tolist() == [True, False]
    torch.testing.assert_close(points, torch.tensor([[0.6, 0.8]], dtype=torch.float64))


def test_mass_inside_a_cone_by_hand() -> None:
    cosines = torch.tensor([0.9, 0.5, 0.1, -0.2], dtype=torch.float64)
    weights = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    assert mass_inside(cosines, weights, 0.1) == pytest.approx(0.9)
    assert mass_inside(cosines, weights, 0.6) == pytest.approx(0.4)
    assert constant_at_mass(cosines, weights, 0.9) == pytest.approx(0.1)
    assert constant_at_mass(cosines, weights, 0.91) == pytest.approx(-0.2)
    assert constant_at_mass(cosines, weights, 0.7) == pytest.approx(0.5)
    assert constant_at_mass(cosines, weights, 1.0) == pytest.approx(-0.2)


def test_approximate_cone_drops_the_light_offender() -> None:
    # Two heavy points at a right angle and a light one opposite to their middle: without it c = sqrt(1/2), with it none.
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-math.sqrt(0.5), -math.sqrt(0.5)]], dtype=torch.float64)
    weights = torch.tensor([0.6, 0.38, 0.02], dtype=torch.float64)
    assert not cone_constant(points).certified
    constant, direction = approximate_cone(points, weights, 0.95, torch.tensor([0.8, 0.6], dtype=torch.float64))
    assert constant == pytest.approx(math.sqrt(0.5), abs=1e-3)
    assert mass_inside(points @ direction, weights, constant) == pytest.approx(0.98)


@pytest.mark.parametrize("path", vectors.theory_files(), ids=lambda path: path.stem)
def test_exhaustive_optimum_equals_the_vectors(path: Path) -> None:
    stored = load_file(path)
    p, v = stored["p"], stored["v"]
    found = exhaustive_gap(p, p @ v - v, len(stored["best"]))
    assert found.best == tuple(stored["best"].tolist())
    assert found.greedy == tuple(stored["greedy"].tolist())
    assert found.f_best == pytest.approx(float(stored["F_best"]), rel=1e-9)
    assert found.f_greedy == pytest.approx(float(stored["F_greedy"]), rel=1e-9)
    assert found.ratio == pytest.approx(float(stored["F_greedy"] / stored["F_best"]), rel=1e-9)


def test_removal_cost_is_the_change_of_the_renormalised_output() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(7, dtype=torch.float64, generator=generator)
    p /= p.sum()
    v = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    a = p @ v
    for removed in itertools.combinations(range(7), 3):
        gone = torch.zeros(7, dtype=torch.bool)
        gone[list(removed)] = True
        left = p * ~gone
        change = (left / left.sum()) @ v - a
        assert float(removal_cost(p, a - v, gone)) == pytest.approx(float(change.norm()), abs=1e-12)


def triple(n: int = 120, d: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """p, residuals and evicted keys of a made-up query."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(n, dtype=torch.float64, generator=generator), 0)
    v = torch.randn(n, d, dtype=torch.float64, generator=generator)
    evicted = torch.ones(n, dtype=torch.bool)
    evicted[p.topk(20).indices] = False
    evicted[-8:] = False
    return p, p @ v - v, evicted


def test_strata_are_what_they_say() -> None:
    p, residuals, evicted = triple()
    random_gap, tail_gap, threshold_gap = gaps(p[:112], residuals[:112], int(evicted.sum()), random.Random(1))
    for gap in (random_gap, tail_gap, threshold_gap):
        assert len(gap.greedy) == len(gap.best) == 10
        assert gap.f_best <= gap.f_greedy
        assert gap.ratio >= 1
    assert tail_gap.f_best < random_gap.f_best  # the tail weighs less
    assert gaps(p[:112], residuals[:112], 92, random.Random(1))[0] == random_gap  # the seed decides


def test_factor_needs_a_cone_and_a_small_removed_term() -> None:
    p, residuals, evicted = triple()
    pushed = residuals + torch.tensor([20.0] + [0.0] * 7, dtype=torch.float64)
    item = study(0, 0, 0, p, pushed, evicted, 112, random.Random(0))
    assert item.eps == pytest.approx(float(p[evicted].max()))
    assert item.evicted_mass == pytest.approx(float(p[evicted].sum()))
    assert item.cone.certified
    by_mass = 1 / (item.cone.lower * (1 - item.eps) * (1 - item.evicted_mass))
    assert item.factor(mass=True) == pytest.approx(by_mass)
    product = item.candidates * item.eps
    assert item.factor() == (
        float("inf") if product >= 1 else pytest.approx(by_mass * (1 - item.evicted_mass) / (1 - product))
    )
    assert item.constants[1] >= item.constants[0] - 1e-3  # less mass allows a wider choice
    assert item.masses[0] == pytest.approx(1.0)
    mixed = study(0, 0, 0, p, residuals - residuals[evicted].mean(0), evicted, 112, random.Random(0))
    assert not mixed.cone.certified
    assert mixed.factor(mass=True) == float("inf")


def test_capture_sees_the_attention_of_the_last_queries(tiny_llama: Model) -> None:
    seen: list[LayerView] = []
    ids = [(7 * index) % 500 + 3 for index in range(70)]
    capture(tiny_llama, ids, 8, seen.append)
    assert [view.layer for view in seen] == [0, 1, 2]
    reference = copy.deepcopy(tiny_llama.network)
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = reference(torch.tensor([ids]), output_attentions=True).attentions
    for view in seen:
        for head in range(4):
            p = view.probabilities(head)
            torch.testing.assert_close(p, attentions[view.layer][0, head, -8:].double(), atol=1e-6, rtol=1e-4)
            residuals = view.residuals(head, p[3])
            assert float((p[3] @ residuals).norm()) < 1e-6  # sum_j p_j r_j = 0
        evicted = evictions(view, 20)
        assert evicted.sum(1).tolist() == [50, 50]
        assert not evicted[:, -8:].any()


def test_report_of_a_tiny_model() -> None:
    model = tiny.model("llama")
    document = Document.of(TEXT, "ledger")
    lines = theory_report(model, document, budget=0.25, samples=5, seed=3)
    assert json.loads(json.dumps(lines, allow_nan=False)) == lines
    assert lines == theory_report(model, document, budget=0.25, samples=5, seed=3)
    tables = [line["table"] for line in lines]
    counts = {table: tables.count(table) for table in tables}
    assert counts == {
        "eps": 1,
        "cone": 1,
        "approximate cone": 2,
        "mass": 3,
        "factor": 2,
        "gap": 3,
        "angle": 1,
        "residual": 1,
    }
    for line in lines:
        assert line["version"] == 1
        assert line["kind"] == "theory"
        assert line["kept"] + line["evicted"] == line["document_tokens"]
        assert line["triples"] == (3 * 4 * 8 if line["table"] == "eps" else 5)
    angle = lines[tables.index("angle")]
    assert sum(angle["counts"]) + angle["no_cone"] == 5
    assert all(line["median"] >= 1 for line in lines if line["table"] == "gap")
    text = render_theory(lines)
    assert "tiny-llama, ledger" in text
    assert "near threshold" in text
    assert "exhaustive" in text


def test_question_joins_the_window(tiny_llama: Model) -> None:
    document = Document.of(TEXT, "ledger")
    plain = theory_report(tiny_llama, document, budget=0.25, samples=1)
    asked = theory_report(tiny_llama, document, budget=0.25, samples=1, question="Who kept it?")
    assert asked[0]["document_tokens"] > plain[0]["document_tokens"]
    assert asked[0]["question"] == "Who kept it?"


def test_sliding_layers_are_left_out() -> None:
    model = tiny.model("mistral", sliding_window=32)
    with pytest.raises(Exception, match="no full-attention layers"):
        theory_report(model, Document.of(TEXT), budget=0.25, samples=2)


@pytest.mark.parametrize(
    ("text", "settings", "error", "message"),
    [
        ("too short", {}, DocumentError, "the theory bench needs 48"),
        (TEXT * 9, {}, DocumentError, "has 512 positions"),
        (TEXT, {"samples": 0}, UsageError, "--samples 1"),
        (TEXT, {"budget": 0.0}, BudgetError, "0.05"),
        (TEXT, {"budget": 4}, BudgetError, "always kept"),
        (TEXT, {"budget": 100_000}, UsageError, "nothing is evicted"),
    ],
)
def test_bad_input_is_one_line(
    tiny_llama: Model, text: str, settings: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        theory_report(tiny_llama, Document.of(text, "doc"), **settings)
    assert "\n" not in str(caught.value)
