"""Budget rules against the vectors, and the property every file relies on: a prefix of a head is the smaller budget."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dropkv.budgets import check_forced, forced_positions, kept, kept_count, select
from dropkv.errors import BudgetError, UsageError
from dropkv.methods import get, score
from tests.vectors import budget_files, score_files

RULES = {"uniform": "uniform", "head-adaptive": "adaptive"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("path", budget_files(), ids=lambda path: path.stem)
def test_kept_sets_equal_the_vectors(path, rule):
    with safe_open(path, "pt") as file:
        for case, text in file.metadata().items():
            if case.startswith("pyramid"):
                continue
            facts = json.loads(text)
            assert kept_count(facts["budget"], facts["tokens"], facts["forced"]) == facts["kept"]
            got = kept(
                file.get_tensor(f"{case}.scores"),
                facts["kept"],
                forced=facts["forced"],
                rule=rule,
                alpha=facts["alpha"],
            )
            assert [len(part) for part in got] == file.get_tensor(f"{case}.{RULES[rule]}.counts").tolist()
            assert torch.equal(torch.cat(got), file.get_tensor(f"{case}.{RULES[rule]}.positions"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("path", score_files(), ids=lambda path: path.stem)
def test_end_to_end_kept_sets_equal_the_vectors(path, rule):
    with safe_open(path, "pt") as file:
        for name in ("dropkv", "dropkv_replay", "snapkv"):
            scores = get(name).pooled(score(name, *(file.get_tensor(part) for part in "qkv"), scale=0.25))
            for budget in (0.1, 0.3):
                got = kept(scores, kept_count(budget, 131, 8), forced=8, rule=rule)
                prefix = f"kept.{name}.{RULES[rule]}.{budget}"
                assert [len(part) for part in got] == file.get_tensor(f"{prefix}.counts").tolist()
                assert torch.equal(torch.cat(got), file.get_tensor(f"{prefix}.positions"))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), heads=st.integers(1, 5), n=st.integers(1, 40), levels=st.integers(1, 9), first=st.integers(0, 3),
    last=st.integers(0, 6), alpha=st.sampled_from([0.0, 0.2, 0.5, 1.0]), rule=st.sampled_from(list(RULES)),
)  # fmt: skip
def test_admit_is_the_smallest_count_that_keeps_an_entry(seed, heads, n, levels, first, last, alpha, rule):
    """On scores full of ties: for every smaller count, the entries with admit <= count are the kept set, and a prefix of each head."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (heads, n), generator=generator).float()
    unpooled = torch.randint(levels, (heads, n), generator=generator).float()
    forced = forced_positions(n, first, last)
    everything = select(scores, n, forced=forced, rule=rule, alpha=alpha, unpooled=unpooled)
    parts = list(
        zip(
            everything.positions.split(everything.counts.tolist()),
            everything.admit.split(everything.counts.tolist()),
            strict=True,
        )
    )
    for count in range(max(1, len(forced)), n + 1):
        want = kept(scores, count, forced=forced, rule=rule, alpha=alpha, unpooled=unpooled)
        some = select(scores, count, forced=forced, rule=rule, alpha=alpha, unpooled=unpooled)
        assert sum(len(part) for part in want) == heads * count
        for head, (positions, admit) in enumerate(parts):
            assert bool((admit.diff() >= 0).all())
            size = int((admit <= count).sum())
            assert torch.equal(positions[:size].sort().values, want[head])
            own = slice(int(some.counts[:head].sum()), int(some.counts[: head + 1].sum()))
            assert torch.equal(some.positions[own], positions[:size]) and torch.equal(some.admit[own], admit[:size])


def test_order_inside_a_head_by_hand():
    """Forced newest first, then pooled, then unpooled, then the earlier position."""
    pooled = torch.tensor([[9.0, 5.0, 5.0, 5.0, 7.0, 0.0, 0.0]])
    unpooled = torch.tensor([[9.0, 1.0, 5.0, 1.0, 7.0, 0.0, 0.0]])
    chosen = select(pooled, 7, forced=2, unpooled=unpooled)
    assert chosen.positions.tolist() == [6, 5, 0, 4, 2, 1, 3]
    assert chosen.admit.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_head_adaptive_by_hand():
    """Two heads, three places each, half of them a floor: the loud head gets the four that are shared."""
    scores = torch.tensor([[1.0, 9.0, 8.0, 7.0, 6.0, 5.0], [0.4, 0.3, 0.2, 0.1, 0.0, 0.0]])
    chosen = select(scores, 3, rule="head-adaptive", alpha=0.4)
    assert chosen.counts.tolist() == [5, 1]
    assert chosen.positions.tolist() == [1, 2, 3, 4, 5, 0]
    assert chosen.admit.tolist() == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]  # at 1: 9 and 8; at 2: 7 and 6; at 3 the floor of the quiet head opens


@pytest.mark.parametrize(
    "budget,n,want", [(0.29, 100, 29), (0.57, 100, 57), (1.0, 40, 40), (2048, 100, 100), (16, 100, 16), (0.05, 100, 8)]
)
def test_kept_counts(budget, n, want):
    assert kept_count(budget, n, 8) == want


def test_too_small_a_budget_is_refused_with_the_smallest_that_works():
    with pytest.raises(BudgetError, match="--budget 8"):
        check_forced(0.05, 100, 8)
    with pytest.raises(BudgetError, match=r"^a\.txt: budget 1 is 1 entry per head of 100 tokens, fewer than the 8"):
        check_forced(1, 100, 8, "a.txt")
    check_forced(8, 100, 8)
    check_forced(1, 1, 8)


def test_an_unknown_rule_is_refused():
    with pytest.raises(UsageError, match="head-adaptive"):
        kept(torch.zeros(1, 3), 2, rule="fair")
