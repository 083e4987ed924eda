"""What a method is given of one layer, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dropkv.errors import UsageError
from dropkv.kernels.dispatch import value_sizes_on_gpu
from dropkv.kernels.moments import Moments
from dropkv.kernels.projection import l2_norms, mean_l1_norms, roots
from dropkv.kernels.score import Window


@dataclass(frozen=True, eq=False)
class LayerContext:
    """One layer of a document of n tokens, all of it.

    k [kv_heads, n, d] and v [kv_heads, n, d_v] after RoPE; scale and softcap of the logits; seed, already the layer's own.
    q [kv_heads, G, m, d]: the last m positions' queries, None where probes observe instead (m may be 0).
    wo [model dim, heads * d_v]: the output projection as nn.Linear stores it, or how to get it.
    attention [kv_heads, n]: the mean over the group's heads of the attention that ALL document queries pay each key, summed.
    expected: mean and covariance of the queries to come (see `expected_attention`).
    more_seeds: where several documents of n tokens are read together, their KV heads stand one document after another, and these are the
    seeds of the second and later ones.
    What is None was not collected; a method that needs it raises UsageError.
    """

    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    q: Tensor | None = None
    wo: Tensor | Callable[[], Tensor] | None = None
    attention: Tensor | None = None
    expected: Moments | None = None
    seed: int = 0
    more_seeds: tuple[int, ...] = ()

    @property
    def documents(self) -> int:
        """How many documents are read together."""
        return 1 + len(self.more_seeds)

    @property
    def n(self) -> int:
        """Document tokens."""
        return self.k.shape[1]

    @cached_property
    def projection(self) -> Tensor:
        """The output projection [model dim, heads * d_v]."""
        wo = self.wo() if callable(self.wo) else self.wo
        if wo is None:
            raise UsageError("this method needs the output projection: pass wo, [model dim, heads * d_v]")
        return wo.detach()

    @cached_property
    def roots(self) -> Tensor:
        """[kv_heads, G, d_v, d_v] with ||x R_h||_2 = ||x W_h||_2."""
        own = roots(self.projection, self.v.shape[0] // self.documents, self.v.shape[-1])
        return own.repeat(self.documents, 1, 1, 1)

    @cached_property
    def value_lengths(self) -> Tensor:
        """||v_j W_h||_2 [kv_heads, G, n]."""
        return l2_norms(self.v, self.roots)

    @cached_property
    def value_sizes(self) -> Tensor:
        """The group's mean of ||v_j W_h||_1 [kv_heads, n]."""
        sizes = value_sizes_on_gpu(self.v, self.projection, self.documents)
        return mean_l1_norms(self.v, self.projection, self.documents) if sizes is None else sizes

    def window(self, *, projected: bool) -> Window:
        """The observation queries of the document's last positions; with the projection's roots where lengths behind it are asked."""
        if self.q is None:
            raise UsageError("this method observes with queries: pass q, or use an observer with probes")
        return Window(self.q, self.k, self.v, self.scale, self.softcap, roots=self.roots if projected else None)


@dataclass(frozen=True, eq=False)
class LayerScores:
    """What a method says of one layer, before pooling and for every budget.

    raw float32 [kv_heads, n]; larger is kept. beside [parts, kv_heads, n]: what else the method's pooling or budget rule needs, such as
    CAKE's terms of the layer preference or CriticalKV's norms.
    """

    raw: Tensor
    beside: Tensor | None = None


class Gathered:
    """Scores of several probes of one layer put together: the largest score of any probe that observes a key counts."""

    def __init__(self) -> None:
        self.raw: Tensor | None = None
        self.beside: Tensor | None = None

    def add(self, part: LayerScores, first: int, n: int) -> None:
        """Take in the scores of the keys from `first` on."""
        self.raw = _largest(self.raw, part.raw, first, n)
        if part.beside is not None:
            self.beside = _largest(self.beside, part.beside, first, n)

    def scores(self) -> LayerScores | None:
        """Everything so far, with 0 for keys that no probe observed; None when there was no probe."""
        if self.raw is None:
            return None
        return LayerScores(_known(self.raw), None if self.beside is None else _known(self.beside))


def _known(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0)


def _largest(old: Tensor | None, new: Tensor, first: int, n: int) -> Tensor:
    if old is None:
        old = new.new_full((*new.shape[:-1], n), -torch.inf)
    part = old[..., first : first + new.shape[-1]]
    torch.maximum(part, new, out=part)
    return old
