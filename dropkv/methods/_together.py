"""The two orders of a method whose heads keep the same tokens, layer after layer (docs/question-free.md says why)."""

from __future__ import annotations

from torch import Tensor

from dropkv.methods._base import LayerScores, Pool, Together, paid_on_average
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
        raw, summed = scores.raw, scores.beside[1]
        words = self._words_on(raw)
        level = raw.mean(-1, keepdim=True)
        whole = words.sums(raw / level.clamp(min=TINY).pow(self.together.balance))
        standing = words.sums(self._standing(scores))
        if self.pool is not None:
            standing = self.pool(standing)
        return summed, whole * standing.clamp(min=TINY), raw, level.squeeze(-1)

    def _standing(self, scores: LayerScores) -> Tensor:
        """The mean over heads of the largest attention paid to every token [n]."""
        if self.standing is not None:
            return self.standing.to(scores.raw.device)
        own = paid_on_average(scores)
        if self.together.scope == "layer":
            return own
        self._paid = own if self._paid is None else self._paid + own
        self._layers += 1
        return self._paid / self._layers

    def _words_on(self, like: Tensor) -> Words:
        if self._words is None:
            self._words = Words.alone(like.shape[-1], like.device)
        if self._words.own.device != like.device:
            self._words = Words(self._words.own.to(like.device), self._words.members.to(like.device))
        return self._words
