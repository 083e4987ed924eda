"""The budget by two orders: layer by layer what the definition says at every count, and a method that uses it."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.selection import Waits
from dropkv.budgets import floor_of, forced_positions
from dropkv.two_orders import TwoOrders, admits, most_held


def definition(own, shared, ties, level, count, forced, alpha, share):
    """Kept (head, position) pairs at a count, all heads at once: no tensors, one sort for each order."""
    heads, n = own.shape
    newest = {position: rank for rank, position in enumerate(forced)}

    def in_own(head):
        def key(j):
            return (0, newest[j]) if j in newest else (1, -float(own[head, j]), -float(ties[head, j]), j)

        return sorted(range(n), key=key)

    floor = int(floor_of(count, len(forced), alpha))
    sure = {(head, j) for head in range(heads) for j in in_own(head)[:floor]}
    sharing = max(1, round(share * heads)) if share else heads
    with_part = set(sorted(range(heads), key=lambda head: (-float(level[head]), head))[:sharing])
    rest = [(head, j) for head in range(heads) for j in range(n) if (head, j) not in sure]
    rest.sort(key=lambda e: (e[0] not in with_part, -float(shared[e]), -float(ties[e]), *e))
    return sure | set(rest[: heads * (count - floor)])


def chosen(found, layers, heads):
    """(head of all layers, position, admit) in file order."""
    entries = []
    for layer in range(layers):
        kept = found[layer]
        start = 0
        for head, count in enumerate(kept.counts.tolist()):
            own = slice(start, start + count)
            entries += [
                (layer * heads + head, j, a)
                for j, a in zip(kept.positions[own].tolist(), kept.admit[own].tolist(), strict=True)
            ]
            start += count
    return entries


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_layer_by_layer_is_the_definition(share, alpha, seed):
    layers, heads, n = 5, 3, 14
    generator = torch.Generator().manual_seed(seed)
    few = seed % 2  # full of ties
    top = 4 if few else 10**6
    own, shared, ties = (torch.randint(top, (layers, heads, n), generator=generator).float() for _ in range(3))
    level = torch.randint(3 if few else 10**6, (layers, heads), generator=generator).float()
    forced = forced_positions(n, 2, 1)
    flat = [x.flatten(0, 1) for x in (own, shared, ties)]
    kept_by: dict[int, dict] = {}
    for count in range(len(forced), n + 1):
        choice = TwoOrders(count, n, forced, layers * heads, alpha, share)
        held = []
        for layer in range(layers):
            choice.add(own[layer], shared[layer], ties[layer], level[layer])
            held = [[kept.positions.tolist(), kept.counts.tolist()] for kept in choice.candidates()]
        found = choice.finish()
        for kept, (positions, _) in zip(found, held, strict=True):
            assert [positions[place] for place in kept.order.tolist()] == kept.positions.tolist()
        entries = chosen(found, layers, heads)
        assert {(head, j) for head, j, _ in entries} == definition(*flat, level.flatten(), count, forced, alpha, share)
        for _, group in itertools.groupby(entries, key=lambda entry: entry[0]):
            admit = [a for _, _, a in group]
            assert admit == sorted(admit)
        kept_by[count] = {(head, j): a for head, j, a in entries}
    whole = kept_by[n]
    for count, admitted in kept_by.items():
        assert admitted == {entry: a for entry, a in whole.items() if a <= count}
        # a smaller budget is the beginning of every head, in the same order
    assert len(whole) == layers * heads * n


def test_file_order_does_not_depend_on_the_budget():
    generator = torch.Generator().manual_seed(7)
    own, shared, ties = torch.rand((3, 4, 2, 40), generator=generator)
    level = torch.rand((4, 2), generator=generator)

    def made(count):
        choice = TwoOrders(count, 40, forced_positions(40, 2, 2), 8, 0.3, 0.4)
        for layer in range(4):
            choice.add(own[layer], shared[layer], ties[layer], level[layer])
        return choice.finish()

    large, small = made(30), made(11)
    for big, little in zip(large, small, strict=True):
        keep = big.admit <= 11
        assert torch.equal(big.positions[keep], little.positions) and torch.equal(big.admit[keep], little.admit)


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("rising", [-1, 0, 1])
def test_layers_with_heads_of_their_own_number(share, rising):
    """Many layers, whose levels rise, fall or are alike: later ones are cut as they come in, and nothing that is kept is lost."""
    n, count, forced = 30, 4, forced_positions(30, 1, 1)
    layers = [3, 1, 4, 1, 5, 2, 3, 1, 2, 4]
    generator = torch.Generator().manual_seed(layers[0] + rising)
    first = [0, *itertools.accumulate(layers)]
    own, shared, ties = (torch.randn((first[-1], n), generator=generator) for _ in range(3))
    level = torch.cat([torch.rand(heads, generator=generator) + rising * i for i, heads in enumerate(layers)])
    choice = TwoOrders(count, n, forced, first[-1], 0.5, share)
    for start, stop in itertools.pairwise(first):
        choice.add(own[start:stop], shared[start:stop], ties[start:stop], level[start:stop])
        newest = choice.newest()
        assert newest.counts.tolist() == choice.held()[-1]
        assert newest.positions.tolist() == choice.candidates()[-1].positions.tolist()
    assert sum(choice.held()[0]) < layers[0] * n and sum(choice.held()[-1]) < layers[-1] * n
    got = set()
    for start, kept in zip(first, choice.finish(), strict=False):
        heads = torch.repeat_interleave(torch.arange(len(kept.counts)), kept.counts) + start
        got |= set(zip(heads.tolist(), kept.positions.tolist(), strict=True))
    assert got == definition(own, shared, ties, level, count, forced, 0.5, share)


def test_candidates_stay_few():
    """Alike heads in many layers: what a prefill counts with is what is held, far from everything."""
    generator = torch.Generator().manual_seed(1)
    layers, heads, n, count = 40, 2, 400, 20
    for share, most in ((0.0, 1.07), (0.4, 3.4)):
        choice = TwoOrders(count, n, [], layers * heads, 0.0, share)
        peak = 0
        for _ in range(layers):
            own, shared = torch.rand((2, heads, n), generator=generator)
            choice.add(own, shared, own, torch.rand(heads, generator=generator))
            peak = max(peak, sum(map(sum, choice.held())))
        expected = most_held(count, n, 0, [heads] * layers, 0.0, share)
        assert 0.95 * expected < peak < 1.03 * expected and expected <= most * layers * heads * count


def test_most_held_by_hand():
    # 20 places for two of four heads: 20 of them when both are known, and a sixteenth
    assert most_held(5, 10, 0, [2, 2], 0.0, 0.5) == 21
    # floors 4, 30 places for three of six heads, 16 left in each: after two layers 16 + 15 + 10 and four floors, 57, and a sixteenth
    assert most_held(9, 20, 2, [2, 2, 2], 0.5, 0.5) == 60
    assert most_held(16, 20, 0, [2, 2], 0.0, 0.5) == 80  # more places than the sharing heads have entries


def test_a_layer_asks_the_device_twice_at_most():
    """Once for its levels and counts, once more when all that is held is looked at."""
    generator = torch.Generator().manual_seed(2)
    choice = TwoOrders(30, 600, forced_positions(600, 2, 2), 60, 0.3, 0.27)
    asked = []
    for _ in range(20):
        own, shared, ties = torch.rand((3, 3, 600), generator=generator)
        with Waits() as waits:
            choice.add(own, shared, ties, torch.rand(3, generator=generator))
            choice.newest()
            choice.held()
        asked.append(waits.count)
    assert max(asked) == 2 and min(asked) == 1


def test_admits_by_hand():
    """Three counts with 1, 2, 2 shared places; the second entry is kept by its own order from 2 on, and gives its place away."""
    sure_from = torch.tensor([4, 2, 4, 1])
    assert admits(sure_from, torch.tensor([1, 2, 2])).tolist() == [1, 2, 2, 1]
    assert admits(torch.tensor([2, 3, 3, 3]), torch.tensor([1, 1, 3])).tolist() == [1, 2, 3, 3]
