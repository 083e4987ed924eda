"""What can still be kept, against its definition; and the entries that are held of it."""

from __future__ import annotations

import pytest
import torch

from dropkv.candidates import Candidates
from dropkv.contest import Contest, hold
from dropkv.paired import TOP, paired

CPU = torch.device("cpu")


def held(firsts):
    """Candidates of one layer; positions count from 0."""
    own = Candidates()
    for first in firsts:
        line = torch.arange(first.shape[1]).expand(first.shape)
        own.add([first.shape[1]] * len(first), line, first, -first)
    return own


def definition(first, levels, floor, places, sharing, heads):
    """Entries of every head that fewer than `places` others are certain to come before."""
    ranked = sorted(range(len(levels)), key=lambda head: (-levels[head], head))
    sure = sharing - (heads - len(levels))
    counts = [floor] * len(levels)
    for rank, head in enumerate(ranked[:sharing]):
        rivals = [float(x) for other in ranked[: max(rank + 1, sure)] for x in first[other, floor:]]
        counts[head] += sum(sum(rival > float(x) for rival in rivals) < places for x in first[head, floor:])
    return counts


@pytest.mark.parametrize("heads", [6, 8, 15])
@pytest.mark.parametrize("places", [5, 40, 90])
@pytest.mark.parametrize("ties", [False, True])
def test_what_can_still_be_kept_is_the_definition(heads, places, ties):
    floor, sharing, n = 2, 4, 25
    generator = torch.Generator().manual_seed(places)
    first = torch.randint(6 if ties else 10**6, (6, n), generator=generator).float()
    first[:, floor:] = first[:, floor:].sort(descending=True).values
    levels = torch.randint(3 if ties else 10**6, (6,), generator=generator).tolist()
    want = definition(first, levels, floor, places, sharing, heads)
    own = held([first[:2], first[2:]])
    counts, contest = hold(own, levels, floor, places, sharing, heads)
    assert counts == want
    # looking at every third entry never loses one, and lets up to two threes more stay
    few, rough = hold(own, levels, floor, places, sharing, heads, looked_at=4 * (n - floor) // 3)
    assert all(count <= some <= count + 6 for count, some in zip(counts, few, strict=True))
    assert bool((rough.bars <= contest.bars).all())
    assert bool((contest.bars[1:] >= contest.bars[:-1]).all()) and float(contest.bars[-1]) == torch.inf


def test_what_later_heads_have_to_reach():
    first = torch.tensor([[9.0, 7, 5], [8, 6, 4], [3, 2, 1]])
    counts, contest = hold(held([first]), [2.0, 3.0, 1.0], 0, 2, 2, 9)
    # the second head has the highest level: its two best, and of the first head what is among the two best of both
    assert counts == [1, 2, 0]
    assert contest.bars.tolist() == [-torch.inf, 6, torch.inf]
    assert contest.bar(torch.tensor([4.0, 3.0, 2.5, 2.0, 1.5, 0.5])).tolist() == [
        -torch.inf, 6, 6, torch.inf, torch.inf, torch.inf,
    ]  # fmt: skip
    # when four heads are still to come and five have a part, one of those so far has one in any case
    assert hold(held([first]), [2.0, 3.0, 1.0], 0, 2, 5, 7)[1].bars.tolist()[:2] == [6, 6]
    counts, contest = hold(held([first]), [2.0, 3.0, 1.0], 1, 4, 2, 9)
    assert counts == [3, 3, 1] and contest.bars.tolist() == [-torch.inf, -torch.inf, torch.inf]
    assert isinstance(contest, Contest)


def test_candidates_by_hand():
    own = Candidates()
    table = torch.tensor([[4, 2, 0], [1, 3, 5]])
    own.add([3, 3], table, table.float(), -table.float())
    own.add([1, 2], table + 10, table + 10.0, table - 10.0)
    assert own.held() == [[3, 3], [1, 2]] and len(own) == 9
    assert own.positions.tolist() == [4, 2, 0, 1, 3, 5, 14, 11, 13]
    head, place = own.heads()
    assert head.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 3] and place.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1]
    own.cut([1, 2, 0, 1])
    assert own.positions.tolist() == [4, 1, 3, 11]
    assert own.first.tolist() == [4, 1, 3, 11] and own.second.tolist() == [-4, -1, -3, -9]
    own.cut([1, 2, 0, 1])
    assert own.held() == [[1, 2], [0, 1]] and len(own) == 4
    last = own.of_layer(-1)
    assert last.positions.tolist() == [11] and last.counts.tolist() == [0, 1] and last.admit.tolist() == [0]
    first = own.of_layer(0)
    assert (first.positions.tolist(), first.admit.tolist(), first.counts.tolist()) == ([4, 1, 3], [0, 0, 1], [1, 2])


def test_pairs_sort_as_two_keys():
    numbers = [-torch.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 3.0, torch.inf]
    first, second = (
        part.flatten() for part in torch.meshgrid(torch.tensor(numbers), torch.tensor(numbers), indexing="ij")
    )
    keys = paired(first, second)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    for one, key in zip(pairs, keys.tolist(), strict=True):
        for other, rival in zip(pairs, keys.tolist(), strict=True):
            assert (one < other, one == other) == (key < rival, key == rival)
    assert int(keys.max()) < TOP - 10**9
