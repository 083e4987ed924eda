"""The tails of a batch: keys and values of every row's own tokens, in buffers made once."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from dropkv.models import LayerGeometry


class Tails:
    """Per layer keys [rows, kv_heads, capacity, d_k] and values [rows, kv_heads, capacity, d_v]; nothing grows and nothing is copied per token."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.keys, self.values = list(keys), list(values)
        self.rows, _, self.capacity, _ = keys[0].shape

    @classmethod
    def of(
        cls,
        geometry: Sequence[LayerGeometry],
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        rows: int,
        capacity: int,
    ) -> Tails:
        """New ones, each layer's on its own device."""
        places = list(zip(geometry, devices, strict=True))
        return cls(
            [_zeros((rows, g.kv_heads, capacity, g.d_k), dtype, at) for g, at in places],
            [_zeros((rows, g.kv_heads, capacity, g.d_v), dtype, at) for g, at in places],
        )

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(part.numel() * part.itemsize for part in (*self.keys, *self.values))

    def put(self, layer: int, rows: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [kv_heads, t, d] of t tokens: token i goes to rows[i], places[i] (int64, on the layer's device)."""
        self.keys[layer][rows, :, places] = k.transpose(0, 1)
        self.values[layer][rows, :, places] = v.transpose(0, 1)

    def move(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of one row become those of another."""
        for part in (*self.keys, *self.values):
            part[target, :, :length] = part[source, :, :length]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: what no token has been written to is multiplied by a weight of 0, and 0 times what memory held may be no number.

    On a CPU they are pages that the system has promised and not made yet, so that rows and places that are never used take no memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would hold the places of many tokens
    return torch.frombuffer(pages, dtype=torch.uint8)[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def row_bytes(geometry: Sequence[LayerGeometry], dtype: torch.dtype, capacity: int) -> int:
    """Bytes of one row of that capacity."""
    return sum(g.kv_heads * (g.d_k + g.d_v) for g in geometry) * capacity * dtype.itemsize
