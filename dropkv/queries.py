"""What is kept of a layer's document queries while its slices go by: the window, and what methods want of all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dropkv.kernels.dispatch import received_on_gpu
from dropkv.kernels.moments import Moments, rotate, unrotate
from dropkv.kernels.score import Window, score_blocks

SINKS = 4  # the first tokens' queries are unlike all others, so no statistics are taken of them
FUTURE = 512  # positions behind the document over which queries to come are expected

Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions -> cos and sin


class Queries:
    """One layer's. n: document tokens; last: how many of the newest queries are the window; needs: those of the methods.

    attention [kv_heads, n], if asked: what all queries pay each key, summed, the mean over the group's heads.
    """

    def __init__(self, n: int, last: int, needs: frozenset[str]) -> None:
        self.n = n
        self.last = last
        self.needs = needs
        self.attention: Tensor | None = None
        self._window: list[Tensor] = []
        self._moments = Moments()
        self._seen = 0

    def add(self, q: Tensor, k: Tensor, scale: float, softcap: float | None, rotation: Rotation) -> None:
        """The next slice's queries [heads, s, d] and the keys so far [kv_heads, stop, d]. A slice that is computed again is passed over."""
        start, stop = self._seen, k.shape[1]
        if stop <= start:
            return
        first = self.n - self.last  # the window may lie in two slices
        window = q[:, max(0, first - start) :].clone() if stop > first else None
        if "all queries" in self.needs:
            received = received_on_gpu(_grouped(q, len(k)), k, scale, softcap)
            if received is None:
                window_of = Window(_grouped(q, len(k)), k, k[..., :0], scale, softcap)
                received = score_blocks(window_of, lambda block: block.probability())
            if self.attention is None:
                self.attention = received.new_zeros((len(k), self.n))
            self.attention[:, :stop] += received
        if "query statistics" in self.needs:
            skip = max(0, min(SINKS, self.n - 1) - start)
            line = torch.arange(start + skip, stop, device=q.device)
            if len(line):
                self._moments.add(unrotate(q[:, skip:], *rotation(line)))
        if window is not None:
            self._window.append(window)
        self._seen = stop  # nothing has failed for want of memory

    def window(self, k: Tensor, heads: int) -> Tensor:
        """The window's queries [kv_heads, G, m, d], of keys k [kv_heads, n, d]; m is 0 where probes observe."""
        q = torch.cat(self._window, dim=1) if self._window else k.new_zeros((heads, 0, k.shape[-1]))
        return _grouped(q, len(k))

    def expected(self, rotation: Rotation) -> Moments | None:
        """Queries to come: the statistics of the document's, turned by the average rotation of the next positions."""
        if not self._moments.count:
            return None
        line = torch.arange(self.n, self.n + FUTURE, device=self._moments.mean.device)
        cos, sin = (part.mean(0) for part in rotation(line))
        moments = Moments()
        moments.count = self._moments.count
        moments.mean = rotate(self._moments.mean, cos, sin)
        once = rotate(self._moments.scatter, cos, sin)
        moments.scatter = rotate(once.transpose(1, 2), cos, sin).transpose(1, 2)
        return moments


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries [heads, s, d] as [kv_heads, G, s, d]."""
    return q.view(kv_heads, q.shape[0] // kv_heads, *q.shape[1:])
