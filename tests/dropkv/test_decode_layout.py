"""Tables of the decode kernels: tiles cover every row once, and no program is there for nothing."""

from __future__ import annotations

import random

import torch

from dropkv.cache import Prefix
from dropkv.decode.layout import Layout
from dropkv.models import LayerGeometry
from formats import LayerEntries

GEOMETRY = LayerGeometry("full", 2, 1, 4, 4, None)


def prefix_of(entries: int) -> Prefix:
    kept, places = torch.zeros((entries, 4)), torch.arange(entries, dtype=torch.int32)
    bounds = torch.tensor([0, entries], dtype=torch.int32)
    return Prefix([LayerEntries(kept, kept, bounds, places, places, torch.zeros(entries))], [GEOMETRY], entries)


def test_every_row_is_in_one_tile_of_its_prefix():
    """Eight rows to a tile, up to four prefixes, rows that belong to none at the end."""
    prefixes = [prefix_of(20 + number) for number in range(4)]
    draw = random.Random(0)
    for _ in range(60):
        rows, some = draw.randint(1, 40), prefixes[: draw.randint(1, 4)]
        layout = Layout(some, torch.device("cpu"), rows, most=4, tile=16)
        whose = [draw.choice(some) for _ in range(draw.randint(1, rows))]
        layout.place_rows(whose)
        seen = []
        for prefix, first, count in layout.tiles.tolist():
            mine = layout.order[first : first + count].tolist()
            assert count * 2 <= layout.tile and all(whose[row] is some[prefix] for row in mine)
            seen += mine
        assert sorted(seen) == list(range(len(whose)))


def test_one_prefix_leaves_no_tile_empty():
    """A program that finds nothing to do waits for its turn all the same, and what comes behind waits for it."""
    prefix = prefix_of(20)
    for rows in (1, 7, 8, 9, 16, 64):
        layout = Layout([prefix], torch.device("cpu"), rows, most=4, tile=16)
        layout.place_rows([prefix] * rows)
        assert all(count > 0 for _, _, count in layout.tiles.tolist())
