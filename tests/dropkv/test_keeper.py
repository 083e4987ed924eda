"""What is held of a layer is shortened with and without asking the device."""

from __future__ import annotations

import dataclasses

import torch

from dropkv.keeper import shorten, trim
from formats import LayerEntries


def test_both_ways_of_shortening():
    entries = LayerEntries(
        keys=torch.arange(14.0).view(7, 2),
        values=torch.arange(21.0).view(7, 3),
        offsets=torch.tensor([0, 3, 3, 7], dtype=torch.int32),
        positions=torch.tensor([5, 1, 9, 2, 4, 6, 8], dtype=torch.int32),
        admit=torch.arange(7, dtype=torch.int32),
        scores=torch.arange(7) / 8,
    )
    short = shorten(entries, [3, 0, 4], [2, 0, 3])
    assert short.positions.tolist() == [5, 1, 2, 4, 6] and short.offsets.tolist() == [0, 2, 2, 5]
    assert short.keys[:, 0].tolist() == [0, 2, 6, 8, 10] and short.values[:, 2].tolist() == [2, 5, 11, 14, 17]
    other = trim(entries, torch.tensor([2, 0, 3]))
    for field in dataclasses.fields(entries):
        one, two = getattr(short, field.name), getattr(other, field.name)
        assert (one is None and two is None) or (torch.equal(one, two) and one.dtype == two.dtype)
    assert len(shorten(entries, [3, 0, 4], [0, 0, 0]).keys) == 0
