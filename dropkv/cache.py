"""The cache of an answer: an unchanging compressed prefix, ragged per head, and a tail that grows with question and answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.decode.tails import Tails
from dropkv.kernels.decode import attend_prefix_and_tail
from dropkv.models import LayerGeometry
from formats import LayerEntries, Quantization
from formats.quantized import restore_all

TAIL_STEP = 256  # the tail's buffers grow by at least so many tokens


class Prefix:
    """The compressed document: per layer the kept entries of all KV heads end to end. Never changed after it is made.

    n: tokens of the original document; the first question token stands at position n. quantization: how entries are to be restored, None
    when they are there as they are; only then can a prefix be attended to.
    """

    def __init__(
        self,
        layers: Sequence[LayerEntries],
        geometry: Sequence[LayerGeometry],
        n: int,
        quantization: Quantization | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.geometry = tuple(geometry)
        self.n = n
        self.quantization = quantization
        self.bounds = tuple(tuple(int(bound) for bound in layer.offsets.tolist()) for layer in layers)

    def emptied(self) -> Prefix:
        """A document of no tokens, on the same devices."""

        def empty(layer: LayerEntries) -> LayerEntries:
            return LayerEntries(
                keys=layer.keys[:0],
                values=layer.values[:0],
                offsets=torch.zeros_like(layer.offsets),
                positions=layer.positions[:0],
                admit=layer.admit[:0],
                scores=layer.scores[:0],
            )

        return Prefix([empty(layer) for layer in self.layers], self.geometry, 0)

    @property
    def entries(self) -> int:
        """Kept entries of all layers and KV heads."""
        return sum(bounds[-1] for bounds in self.bounds)

    def to(self, devices: torch.device | Sequence[torch.device], dtype: torch.dtype) -> Prefix:
        """The same prefix on one device or each layer on its own, in the reader's compute dtype (widening is exact); quantised entries are
        restored there."""
        places = [devices] * len(self.layers) if isinstance(devices, torch.device) else devices
        if self.quantization is not None:
            shapes = [(layer.d_k, layer.d_v) for layer in self.geometry]
            restored = restore_all(self.layers, self.quantization, shapes, places, dtype)
            return Prefix(restored, self.geometry, self.n)

        def move(layer: LayerEntries, device: torch.device) -> LayerEntries:
            return LayerEntries(
                keys=layer.keys.to(device, dtype),
                values=layer.values.to(device, dtype),
                offsets=layer.offsets.to(device),
                positions=layer.positions.to(device),
                admit=layer.admit,
                scores=layer.scores,
            )

        moved = [move(layer, device) for layer, device in zip(self.layers, places, strict=True)]
        return Prefix(moved, self.geometry, self.n)


class Tail:
    """Keys and values of the tokens behind a prefix: per layer [kv_heads, capacity, d], `length` of them filled.

    step: a captured decode step that works on these very buffers, for whoever made it.
    """

    def __init__(self) -> None:
        self.length = 0
        self.step: object = None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows: Tails | None = None

    def __len__(self) -> int:
        return self.length

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [kv_heads, t, d] behind the filled tokens of a layer; gives that layer's keys and values so far, new ones included."""
        stop = self.length + k.shape[1]
        keys, values = self._keys.get(layer), self._values.get(layer)
        if keys is None or values is None or keys.shape[1] < stop:
            capacity = max(stop, 2 * self.length, TAIL_STEP)
            keys, values = self._grown(keys, k, capacity), self._grown(values, v, capacity)
            self._keys[layer], self._values[layer] = keys, values
            self._rows = None
        keys[:, self.length : stop] = k
        values[:, self.length : stop] = v
        return keys[:, :stop], values[:, :stop]

    def as_row(self, more: int) -> Tails:
        """The same buffers, those of all layers, as the tails of one row, with room for `more` tokens; the same object as long as they stay."""
        if self._rows is None or self._rows.capacity < self.length + more:
            capacity = -(-max(self.length + more, 2 * self.length) // TAIL_STEP) * TAIL_STEP
            for buffers in (self._keys, self._values):
                for layer, old in buffers.items():
                    if old.shape[1] < capacity:
                        buffers[layer] = self._grown(old, old, capacity)
            parts = [
                [buffers[layer].unsqueeze(0) for layer in sorted(buffers)] for buffers in (self._keys, self._values)
            ]
            self._rows = Tails(*parts)
        return self._rows

    def _grown(self, old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
        new = like.new_empty((like.shape[0], capacity, like.shape[-1]))
        if old is not None:
            new[:, : self.length] = old[:, : self.length]
        return new


class AnswerRun:
    """The run of one forward call behind a prefix: new tokens see the prefix, the tail, and themselves causally."""

    def __init__(self, prefix: Prefix, tail: Tail) -> None:
        self.prefix = prefix
        self.tail = tail
        self.seen = 0

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [1, heads, t, d_v] of t new tokens."""
        self.seen += 1
        keys, values = self.tail.put(layer, k[0], v[0])
        geometry = self.prefix.geometry[layer]
        out = attend_prefix_and_tail(
            q[0],
            self.prefix.layers[layer],
            self.prefix.bounds[layer],
            keys,
            values,
            scale=scale,
            softcap=softcap,
            reach=geometry.window if geometry.kind == "sliding" else None,
            n=self.prefix.n,
        )
        return out[None]
