"""What the decode kernels read from device memory: where prefixes lie, how they are cut into chunks, and which row belongs to which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from dropkv.cache import Prefix
from dropkv.kernels.fused_decode import LARGE

STEP = 16  # chunks are multiples, but for the end of a head
BLOCK = 64  # the same for large tiles, whose kernel takes so many entries at a time


def chunks_of(bounds: Sequence[int], most: int, step: int = STEP) -> list[tuple[int, int, int]]:
    """Chunks (head, first entry, last entry + 1) in order of the heads: at most `most`, or one for each head; those of a head
    are of about one size, a multiple of `step`, and the largest of all is as small as can be."""
    lengths = [stop - start for start, stop in pairwise(bounds)]
    most = max(most, sum(length > 0 for length in lengths))
    size = step
    while sum(-(-length // size) for length in lengths) > most:
        size += step
    chunks = []
    for head, (start, length) in enumerate(zip(bounds, lengths, strict=False)):
        count = -(-length // size)
        each = -(-length // (max(1, count) * step)) * step
        chunks += [(head, at, min(at + each, start + length)) for at in range(start, start + length, max(1, each))]
    return chunks


class Layout:
    """The tables of one set of prefixes of a model and so many rows, on one device.

    tables: per layer int64 [prefixes, 3], addresses of keys, values and positions. chunks: per layer int32 [prefixes, C, 3]. heads: per layer int32
    [prefixes, kv_heads + 1], the chunks of each head. starts, whose, order int32 [rows] and tiles int32 [T, 3] as `kernels.fused_decode.launch`
    says; `place_rows` sets them. tile: queries of a tile. per_head: the most chunks of a head. most: about how many chunks, times tiles, there are
    to be.
    """

    def __init__(self, prefixes: Sequence[Prefix], device: torch.device, rows: int, *, most: int, tile: int) -> None:
        self.prefixes = tuple(prefixes)  # addresses are kept, so what they point to must be
        geometry = prefixes[0].geometry
        self.group = max(shape.query_heads // shape.kv_heads for shape in geometry)
        self.tile = max(16, 1 << (min(tile, rows * self.group) - 1).bit_length(), 1 << (self.group - 1).bit_length())
        step = BLOCK if self.tile >= LARGE else STEP
        self.tables, self.chunks, self.heads = [], [], []
        for layer, shape in enumerate(geometry):
            entries = [prefix.layers[layer] for prefix in prefixes]
            pointers = [[one.keys.data_ptr(), one.values.data_ptr(), one.positions.data_ptr()] for one in entries]
            if any(address % 16 for line in pointers for address in line[:2]):
                raise ValueError("entries must begin at multiples of 16 bytes")
            cut = [chunks_of(prefix.bounds[layer], most, step) for prefix in prefixes]
            longest = max(map(len, cut))
            padded = [[*line, *[(0, 0, 0)] * (longest - len(line))] for line in cut]
            firsts = [[sum(one[0] < head for one in line) for head in range(shape.kv_heads + 1)] for line in cut]
            self.tables.append(torch.tensor(pointers, dtype=torch.int64, device=device))
            self.chunks.append(torch.tensor(padded, dtype=torch.int32, device=device).view(len(prefixes), longest, 3))
            self.heads.append(torch.tensor(firsts, dtype=torch.int32, device=device))
        self.per_head = max(int(part.diff(dim=1).max()) for part in self.heads)
        self.each = self.tile // self.group
        self.tiles_most = (rows + len(self.prefixes) * (self.each - 1)) // self.each  # empty ones take up programs
        self.starts, self.whose, self.order = torch.zeros((3, rows), dtype=torch.int32, device=device).unbind()
        self.tiles = torch.zeros((self.tiles_most, 3), dtype=torch.int32, device=device)

    def place_rows(self, rows: Sequence[Prefix]) -> None:
        """Row i belongs to rows[i], one of the prefixes; further rows to none."""
        numbers = [self.prefixes.index(prefix) for prefix in rows]
        order = sorted(range(len(rows)), key=lambda row: numbers[row])
        tiles = []
        for prefix in range(len(self.prefixes)):
            mine = [place for place, row in enumerate(order) if numbers[row] == prefix]
            tiles += [(prefix, at, min(self.each, mine[-1] + 1 - at)) for at in mine[:: self.each]]
        tiles += [(0, 0, 0)] * (self.tiles_most - len(tiles))
        count = slice(0, len(rows))
        self.starts[count] = torch.tensor([prefix.n for prefix in rows], dtype=torch.int32)
        self.whose[count] = torch.tensor(numbers, dtype=torch.int32)
        self.order[count] = torch.tensor(order, dtype=torch.int32)
        self.tiles.copy_(torch.tensor(tiles, dtype=torch.int32))
