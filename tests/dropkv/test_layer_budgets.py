"""Rules that share entries among layers: as layers come in they end where the rule over all layers at once does, ties included."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dropkv.budgets import forced_positions, kept, kept_count, recent_half, select
from dropkv.layer_budgets import BestSoFar, SharedLayers, pyramid_counts, share_counts
from tests.vectors import budget_files


@pytest.mark.parametrize("path", budget_files(), ids=lambda path: path.stem)
def test_pyramids_equal_the_vectors(path):
    with safe_open(path, "pt") as file:
        cases = {case: json.loads(text) for case, text in file.metadata().items() if case.startswith("pyramid")}
        assert cases
        for case, facts in cases.items():
            count = kept_count(facts["budget"], facts["tokens"], facts["forced"])
            got = pyramid_counts(count, facts["tokens"], facts["forced"], facts["layers"], facts["beta"])
            assert got == file.get_tensor(case).tolist()


@given(n=st.integers(1, 300), forced=st.integers(0, 12), layers=st.integers(1, 40), share=st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_pyramids_spend_exactly_what_there_is(n, forced, layers, share):
    count = kept_count(share, n, forced)
    got = pyramid_counts(count, n, min(forced, n), layers)
    assert sum(got) == layers * count and min(got) >= min(forced, n) and max(got) <= n


def scores_of(generator: torch.Generator, heads: int, n: int, levels: int) -> torch.Tensor:
    return torch.randint(levels, (heads, n), generator=generator).float()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000), layers=st.lists(st.integers(1, 3), min_size=1, max_size=5), n=st.integers(1, 24), levels=st.integers(1, 9),
    first=st.integers(0, 3), last=st.integers(0, 6), alpha=st.sampled_from([0.0, 0.2, 0.7]), share=st.floats(0.05, 1.0),
)  # fmt: skip
def test_model_wide_streams_to_what_all_layers_at_once_give(seed, layers, n, levels, first, last, alpha, share):
    generator = torch.Generator().manual_seed(seed)
    pooled = [scores_of(generator, heads, n, levels) for heads in layers]
    raw = [scores_of(generator, heads, n, levels) for heads in layers]
    forced = forced_positions(n, first, last)
    count = kept_count(share, n, len(forced))
    heads = sum(layers)
    want = select(torch.cat(pooled), count, forced=forced, rule="head-adaptive", alpha=alpha, unpooled=torch.cat(raw))
    best = BestSoFar(count, n, forced, heads, alpha)
    floor = max(len(forced), int(alpha * count + 1e-9))
    for index, (mine, own) in enumerate(zip(pooled, raw, strict=True)):
        before = [part.positions.clone() for part in best.candidates()] if index else []
        best.add(mine, own)
        held = best.candidates()
        seen = sum(layers[: index + 1])
        assert sum(len(part.positions) for part in held) <= seen * floor + heads * (
            count - floor
        )  # memory stays bounded
        for old, new in zip(before, held, strict=False):
            assert set(new.positions.tolist()) <= set(old.tolist())
    got = best.finish()
    assert torch.equal(torch.cat([part.counts for part in got]), want.counts)
    assert torch.equal(torch.cat([part.positions for part in got]), want.positions)
    assert torch.equal(torch.cat([part.admit for part in got]), want.admit)
    assert sum(len(part.positions) for part in got) == heads * count
    smaller = max(1, len(forced), count // 2)
    less = select(torch.cat(pooled), smaller, forced=forced, rule="head-adaptive", alpha=alpha, unpooled=torch.cat(raw))
    admit = torch.cat([part.admit for part in got])
    assert torch.equal(torch.cat([part.positions for part in got])[admit <= smaller], less.positions)


def test_model_wide_is_a_rule_of_kept():
    scores = torch.tensor([[9.0, 1.0, 8.0], [7.0, 2.0, 3.0]])
    assert [part.tolist() for part in kept(scores, 2, rule="model-wide")] == [[0, 2], [0, 2]]
    assert [part.tolist() for part in kept(scores, 1, rule="model-wide", alpha=1.0)] == [[0, 2], []]


def test_shares_by_hand():
    """12 entries beside the forced one: shares 6 : 3 : 1 give 7.2, 3.6, 1.2; what the floors leave goes to the largest."""
    assert share_counts([6.0, 3.0, 1.0], 5, 100, 1) == [9, 4, 2]
    # at most 5 of them fit: two rounds of the surplus for both others, then one from the largest share down
    assert share_counts([6.0, 3.0, 1.0], 5, 6, 1) == [6, 6, 3]
    assert share_counts([0.0, 0.0], 5, 100, 1) == [5, 5]
    assert share_counts([1.0, 1.0, 1.0], 3, 10, 2) == [3, 3, 3]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000), shares=st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.0, 1e6]), min_size=1, max_size=6),
    n=st.integers(1, 30), last=st.integers(0, 5), share=st.floats(0.05, 1.0),
)  # fmt: skip
def test_shared_layers_end_with_their_counts(seed, shares, n, last, share):
    generator = torch.Generator().manual_seed(seed)
    forced = forced_positions(n, 0, last)
    count = kept_count(share, n, len(forced))
    layers = [scores_of(generator, 2, n, 5) for _ in shares]
    shared = SharedLayers(count, n, forced, len(shares))
    for scores, own in zip(layers, shares, strict=True):
        shared.add(scores, scores, own)
        weight = sum(shared.shares)
        held = sum(len(part.positions) for part in shared.candidates())
        assert not weight > 0 or held <= 2 * (2 * count * len(shares) + 2 * len(shares))
    counts = share_counts(shares, count, n, len(forced))
    assert sum(counts) == count * len(shares) and max(counts) <= n and min(counts) >= len(forced)
    for scores, own, got in zip(layers, counts, shared.finish(), strict=True):
        want = select(scores, own, forced=forced, unpooled=scores) if own else None
        assert got.positions.tolist() == ([] if want is None else want.positions.tolist())
        assert got.counts.tolist() == [own, own] and (not own or int(got.admit.max()) <= count)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 30), levels=st.integers(1, 6))
def test_newest_half_is_what_each_count_alone_gives(seed, n, levels):
    scores = scores_of(torch.Generator().manual_seed(seed), 2, n, levels)
    everything = recent_half(scores, n)
    for count in range(1, n + 1):
        newest = -(-count // 2)
        want = kept(scores, count, forced=newest)
        for head, order in enumerate(everything.positions.view(2, n)):
            assert order[:count].sort().values.tolist() == want[head].tolist()
