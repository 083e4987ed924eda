"""Scores of a window of observation queries: exact attention, then one number per KV head and key.

Plain torch, blocked over queries: nothing of size queries x keys x head_dim is ever made, K and V are never repeated per query head.
The computation is float32 (float64 for float64 inputs), whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPS = 1e-6  # METHODS: p / (1 - p + eps)
BLOCK_ELEMENTS = 1 << 19  # logits of one block: 2 MiB of float32, so that the passes over it stay in cache

Reduce = Literal["sum", "max", "mean"]


@dataclass(frozen=True)
class Reduction:
    """How the contributions of all queries of a KV head become one score per key: first over queries, then over the group's heads."""

    queries: Reduce
    group: Reduce


SUM_MEAN = Reduction("sum", "mean")
MAX_MAX = Reduction("max", "max")


@dataclass(frozen=True)
class Block:
    """Some observation queries of one KV head against the keys they see.

    With G query heads per KV head, r rows (queries) and c scored columns (keys):
    probability [G, r, c], values [c, d_v], output [G, r, d_v] (a_t over ALL visible keys), and apart, since 1 - p cancels there, each row's
    likeliest key: likeliest [G, r] (may lie outside the columns), its odds p / (1 - p + eps) [G, r] and its residual a - v [G, r, d_v].
    """

    probability: Tensor
    values: Tensor
    output: Tensor
    likeliest: Tensor
    likeliest_odds: Tensor
    likeliest_residual: Tensor

    def odds(self) -> Tensor:
        """p / (1 - p + eps) [G, r, c], the likeliest key's from the sum of all the others."""
        odds = self.probability / (1.0 + EPS - self.probability)
        return self._put(odds, self.likeliest_odds)

    def squared_distance(self) -> Tensor:
        """||a - v||^2 [G, r, c] from ||v||^2 - 2<a, v> + ||a||^2, the likeliest key's from its residual (the expansion cancels there)."""
        squared = self.values.square().sum(-1)
        distance = torch.matmul(self.output, self.values.transpose(-1, -2)).mul_(-2)
        distance += squared
        distance += self.output.square().sum(-1, keepdim=True)
        return self._put(distance.clamp_(min=0), self.likeliest_residual.square().sum(-1))

    def _put(self, target: Tensor, content: Tensor) -> Tensor:
        columns = target.shape[-1]
        index = self.likeliest.clamp(max=columns - 1).unsqueeze(-1)
        inside = (self.likeliest < columns).unsqueeze(-1)
        return target.scatter_(-1, index, torch.where(inside, content.unsqueeze(-1), target.gather(-1, index)))


Contribution = Callable[[Block], Tensor]


@dataclass(frozen=True)
class Window:
    """Observation queries of one layer and the keys they see.

    q [kv_heads, G, m, d], k [kv_heads, n, d], v [kv_heads, n, d_v]: the queries belong to the last m keys, query t sees keys up to n - m + t.
    `columns`: only the first so many keys are scored (the output is always over all). `positions` int64 [n] and `reach`: on sliding layers
    a query sees only keys less than `reach` positions back.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    columns: int | None = None
    positions: Tensor | None = None
    reach: int | None = None

    def run(self, contribution: Contribution | None, reduction: Reduction = SUM_MEAN) -> tuple[Tensor | None, Tensor]:
        """Scores float32 [kv_heads, columns] (None without a contribution) and attention outputs [kv_heads, G, m, d_v].

        contribution(block) gives [G, rows, columns], one number per query head, query and key; they are reduced as `reduction` says.
        """
        kv_heads, group, m, _ = self.q.shape
        n = self.k.shape[1]
        columns = n if self.columns is None else self.columns
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        outputs = self.q.new_empty((kv_heads, group, m, self.v.shape[-1]), dtype=dtype)
        scores = None if contribution is None else self.q.new_zeros((kv_heads, group, columns), dtype=dtype)
        if scores is not None and reduction.queries == "max":
            scores.fill_(-torch.inf)
        rows = max(1, min(m, BLOCK_ELEMENTS // max(1, group * n)))
        for head in range(kv_heads):
            q, k, v = (part[head].to(dtype) for part in (self.q, self.k, self.v))
            for start in range(0, m, rows):
                stop = min(m, start + rows)
                seen = n - m + stop
                block = self._block(
                    q[:, start:stop], k[:seen], v[:seen], min(columns, seen), self._hidden(start, stop, seen)
                )
                outputs[head, :, start:stop] = block.output
                if scores is not None and contribution is not None:
                    _fold(scores[head], contribution(block), reduction.queries)
        if scores is None:
            return None, outputs
        if reduction.queries == "mean":
            scores /= m
        scores = scores.masked_fill(scores == -torch.inf, 0)  # keys no query sees
        return _over_group(scores, reduction.group).float(), outputs

    def _hidden(self, start: int, stop: int, seen: int) -> Tensor | None:
        """Which of the first `seen` keys lie beyond a sliding layer's reach, bool [rows, seen]; None on layers that see everything."""
        if self.reach is None or self.positions is None:
            return None
        first = self.k.shape[1] - self.q.shape[2]
        own = self.positions[first + start : first + stop]
        return (own.unsqueeze(1) - self.positions[:seen].unsqueeze(0)) >= self.reach

    def _block(self, q: Tensor, k: Tensor, v: Tensor, columns: int, hidden: Tensor | None) -> Block:
        group, rows, _ = q.shape
        seen = k.shape[0]
        logits = torch.matmul(q.reshape(group * rows, -1), k.transpose(0, 1)).mul_(self.scale).view(group, rows, seen)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if rows > 1:
            future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
            logits[:, :, seen - rows :].masked_fill_(future, -torch.inf)
        if hidden is not None:
            logits.masked_fill_(hidden, -torch.inf)
        top, likeliest = logits.max(dim=-1, keepdim=True)
        weights = logits.sub_(top).exp_()
        weights.scatter_(-1, likeliest, 0)
        rest = weights.sum(-1, keepdim=True)  # all others against the likeliest: 1 - p without cancellation
        total = 1 + rest
        others = torch.matmul(weights.view(group * rows, seen), v).view(group, rows, -1)
        own = v[likeliest.squeeze(-1)]
        weights.scatter_(-1, likeliest, 1)
        return Block(
            probability=weights[..., :columns] / total,
            values=v[:columns],
            output=(others + own) / total,
            likeliest=likeliest.squeeze(-1),
            likeliest_odds=(1 / (rest + EPS * total)).squeeze(-1),
            likeliest_residual=(others - rest * own) / total,
        )


def _fold(target: Tensor, contribution: Tensor, how: Reduce) -> None:
    """Take a block's contributions [G, rows, c] into the running scores [G, columns >= c]."""
    part = target[:, : contribution.shape[-1]]
    if how == "max":
        torch.maximum(part, contribution.amax(1), out=part)
    else:
        part += contribution.sum(1)


def _over_group(scores: Tensor, how: Reduce) -> Tensor:
    if how == "max":
        return scores.amax(1)
    return scores.sum(1) if how == "sum" else scores.mean(1)
