"""Entries that may still be kept, of all layers so far, end to end: how many each head has is known without asking the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dropkv.budgets import Kept


class Candidates:
    """Head after head, each head's in an order of which ever less is needed from the end on: positions int64 [entries], and the two keys by
    which heads are compared, first and second [entries]. layers: heads of each; counts: candidates of every head."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.counts: list[int] = []
        self.positions = self.first = self.second = torch.empty(0)

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, counts: Sequence[int], positions: Tensor, first: Tensor, second: Tensor) -> None:
        """The first so many of every head of the next layer, out of [kv_heads, n]."""
        whole = min(counts) == positions.shape[1]

        def behind(old: Tensor, new: Tensor) -> Tensor:
            rows = [new.flatten()] if whole else [row[:count] for row, count in zip(new, counts, strict=True)]
            return torch.cat([old, *rows] if self.layers else rows)

        self.positions = behind(self.positions, positions)
        self.first, self.second = behind(self.first, first), behind(self.second, second)
        self.layers.append(len(counts))
        self.counts += counts

    def cut(self, counts: Sequence[int]) -> None:
        """Only the first so many of every head."""
        if list(counts) == self.counts:
            return
        shift = [old - new for old, new in zip(self.begins(), begins(counts), strict=True)]
        places, by = sent([list(counts), shift], self.positions.device)
        total = sum(counts)
        index = torch.arange(total, device=by.device) + torch.repeat_interleave(by, places, output_size=total)
        self.positions, self.first, self.second = (x[index] for x in (self.positions, self.first, self.second))
        self.counts = list(counts)

    def begins(self) -> list[int]:
        """Where every head begins."""
        return begins(self.counts)

    def heads(self) -> tuple[Tensor, Tensor]:
        """The head of every candidate, and its place in it; both int64 [entries]."""
        counts, begin = sent([self.counts, self.begins()], self.positions.device)
        line = torch.arange(len(counts), device=counts.device)
        head = torch.repeat_interleave(line, counts, output_size=len(self))
        return head, torch.arange(len(self), device=counts.device) - begin[head]

    def held(self) -> list[list[int]]:
        """The counts layer by layer."""
        ends = list(accumulate(self.layers))
        return [self.counts[end - heads : end] for heads, end in zip(self.layers, ends, strict=True)]

    def of_layer(self, layer: int) -> Kept:
        """A layer's; their places in the heads stand for `admit`."""
        held = self.held()
        start = sum(map(sum, held[: range(len(held))[layer]]))
        counts = held[layer]
        total = sum(counts)
        own = self.positions[start : start + total]
        sizes, begin = sent([counts, begins(counts)], own.device)
        place = torch.arange(total, device=own.device) - torch.repeat_interleave(begin, sizes, output_size=total)
        return Kept(own, place, sizes)


def begins(counts: Sequence[int]) -> list[int]:
    """Where each of several parts of so many begins, one behind the other."""
    return list(accumulate(counts, initial=0))[:-1]


def sent(numbers: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers, or lists of as many, on a device that is not waited for."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
