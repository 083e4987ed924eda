"""The two orders of a method whose heads keep the same tokens, layer after layer (docs/question-free.md says why)."""

from __future__ import annotations

import torch
from torch import Tensor

from dropkv.methods._base import LayerScores, Pool, Together
from dropkv.words import Words

TINY = 1e-12


class Orders:
    """Makes a layer's scores into its two orders; holds what tokens stand for in the layers so far.

    pool: of what tokens stand for, along the document. words: the document's, None for every token by itself. standing [n]: what tokens stand
    for in the whole model, for the scope "model".
    """

    def __init__(
        self, together: Together, pool: Pool | None, words: Words | None, standing: Tensor | None = None
    ) -> None:
        if together.scope == "model" and standing is None:
            raise ValueError("what tokens stand for in the whole model has to be given")
        self.together, self.pool, self.standing = together, pool, standing
        self._words = words
        self._paid: Tensor | None = None
        self._layers = 0

    def add(self, scores: LayerScores) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The next layer's own order and shared order [kv_heads, n], what settles their ties, and the level of every head [kv_heads].

        scores: raw, the largest step; beside [2, kv_heads, n], the largest p and the sum of the steps.
        """
        assert scores.beside is not None
        raw, (paid, summed) = scores.raw, scores.beside
        shared, level = self._shared(raw, self._standing(paid))
        return summed, shared, raw, level

    def add_all(self, scores: LayerScores) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same of all layers at once: everything has a dimension of layers, beside behind its first."""
        assert scores.beside is not None
        raw, (paid, summed) = scores.raw, scores.beside
        shared, level = self._shared(raw, torch.stack([self._standing(own) for own in paid]).unsqueeze(-2))
        return summed, shared, raw, level

    def _shared(self, raw: Tensor, standing: Tensor) -> tuple[Tensor, Tensor]:
        """The shared order and the heads' levels, from steps and what tokens stand for before words and neighbours."""
        words = self._words_on(raw)
        level = raw.mean(-1, keepdim=True)
        whole = words.sums(raw / level.clamp(min=TINY).pow(self.together.balance))
        standing = words.sums(standing)
        if self.pool is not None:
            standing = self.pool(standing)
        return whole * standing.clamp(min=TINY), level.squeeze(-1)

    def _standing(self, paid: Tensor) -> Tensor:
        """What every token stands for [n]: the mean over heads of the largest attention paid to it, unless it is given."""
        if self.standing is not None:
            return self.standing.to(paid.device)
        own = paid.mean(0)
        if self.together.scope == "layer":
            return own
        self._paid = own if self._paid is None else self._paid + own
        self._layers += 1
        return self._paid / self._layers

    def _words_on(self, like: Tensor) -> Words:
        if self._words is None:
            self._words = Words.alone(like.shape[-1], like.device)
        if self._words.own.device != like.device:
            self._words = self._words.to(like.device)
        return self._words
