"""Intervals by hand and by what they must cover."""

from __future__ import annotations

import numpy as np
import pytest

from dropkv.bench.stats import difference, estimate, wilson


def test_documents_that_are_all_alike_do_not_say_certainty():
    """Two tasks, one always right and one never: a bootstrap has nothing to draw from."""
    scores = {(task, sample, 0): float(task == "a") for task in "ab" for sample in range(2)}
    found = estimate(scores)
    unseen = wilson(0, 4)[1]
    assert (found.mean, found.low, found.high, found.how) == (0.5, 0.5 - unseen, min(1.0, 0.5 + unseen), "Wilson")
    other = {key: 0.0 for key in scores}
    apart = difference(other, scores)
    assert apart is not None and (apart.mean, apart.low, apart.high) == (-0.5, -0.5 - unseen, -0.5 + unseen)


def single(values: list[float], task: str = "a") -> dict[tuple[str, int, int], float]:
    """One question a document."""
    return {(task, index, 0): value for index, value in enumerate(values)}


def test_wilson_by_hand() -> None:
    # 8 of 10: (0.8 + 0.19207) / 1.38415 = 0.71674, half-width 1.95996 / 1.38415 * sqrt(0.016 + 0.0096036) = 0.22658
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.49016, abs=1e-5)
    assert high == pytest.approx(0.94332, abs=1e-5)
    assert wilson(0, 10)[0] == 0
    assert wilson(0, 10)[1] == pytest.approx(3.841459 / 13.841459, abs=1e-6)  # z^2 / (n + z^2)


def test_right_and_wrong_answers_of_one_task_are_a_share() -> None:
    found = estimate(single([1.0] * 8 + [0.0] * 2))
    assert (found.mean, found.how, found.questions, found.samples) == (0.8, "Wilson", 10, 10)
    assert (found.low, found.high) == pytest.approx((0.49016, 0.94332), abs=1e-5)


def test_mean_is_the_mean_of_the_tasks() -> None:
    scores = single([1.0, 1.0, 1.0, 0.0], "a") | single([0.0, 0.5], "b")
    found = estimate(scores)
    assert found.mean == pytest.approx((0.75 + 0.25) / 2)
    assert (found.how, found.questions, found.samples) == ("bootstrap", 6, 6)


def test_questions_of_one_document_count_as_one() -> None:
    values = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0] * 5
    alone = estimate(single(values))
    together = {("a", index, question): value for index, value in enumerate(values) for question in range(5)}
    shared = estimate(together)
    assert shared.how == "bootstrap"
    assert shared.questions == 200
    assert shared.samples == 40
    assert shared.mean == alone.mean
    assert shared.high - shared.low == pytest.approx(alone.high - alone.low, rel=0.1)


def test_bootstrap_covers_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = estimate(single(rng.beta(2, 3, size=60).tolist()))
        hits += found.low <= 0.4 <= found.high
    assert 180 <= hits <= 198


def test_all_right_is_not_certain() -> None:
    scores = {("a", sample, question): 1.0 for sample in range(10) for question in range(3)}
    found = estimate(scores)
    assert (found.mean, found.high, found.how, found.samples) == (1.0, 1.0, "Wilson", 10)
    assert found.low == pytest.approx(10 / 13.841459, abs=1e-6)


def test_one_document_says_nothing() -> None:
    found = estimate({("a", 0, 0): 1.0, ("a", 0, 1): 0.0})
    assert (found.mean, found.low, found.high, found.how) == (0.5, 0.0, 1.0, "none")


def test_differences_are_paired() -> None:
    first = single([0.0, 1.0, 0.5, 0.0, 1.0, 0.5] * 5)
    better = {key: min(1.0, value + 0.25) for key, value in first.items()}
    found = difference(better, first)
    assert found is not None
    assert found.mean == pytest.approx(0.25 * 4 / 6)
    assert found.low > 0  # the same questions: a small gain is seen, though the scores themselves spread widely
    assert estimate(first).high > estimate(better).low
    turned = difference(first, better)
    assert turned is not None
    assert turned.mean == pytest.approx(-found.mean)


def test_only_common_questions_are_compared() -> None:
    found = difference(single([1.0, 0.0, 1.0]), {("a", 0, 0): 0.0, ("a", 1, 0): 0.0, ("b", 0, 0): 1.0})
    assert found is not None
    assert (found.mean, found.questions) == (0.5, 2)
    assert difference(single([1.0]), single([1.0], "b")) is None


def test_no_difference_is_not_certain() -> None:
    same = single([1.0, 0.0, 0.5, 1.0])
    found = difference(same, same)
    assert found is not None
    assert found.mean == 0
    assert found.high == -found.low == pytest.approx(wilson(0, 4)[1])
    opposite = difference(single([1.0] * 5), single([0.0] * 5))
    assert opposite is not None
    assert (opposite.mean, opposite.high) == (1.0, 1.0)
    assert opposite.low == pytest.approx(wilson(5, 5)[0])


def test_seed_decides() -> None:
    scores = single(np.random.default_rng(0).random(30).tolist())
    assert estimate(scores) == estimate(scores)
    assert estimate(scores, seed=1) != estimate(scores)


def test_nothing_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no scores"):
        estimate({})
