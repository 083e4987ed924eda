"""Scores of a window of observation queries: exact attention, then one number per KV head and key.

Plain torch, blocked over queries: nothing of size queries x keys x head_dim is ever made, K and V are never repeated per query head.
The computation is float32 (float64 for float64 inputs), whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dropkv.kernels.reduce import MAX_MAX, SUM_MEAN, Reduction, Running, over_group

__all__ = [
    "MAX_MAX",
    "SUM_MEAN",
    "Attended",
    "Block",
    "Job",
    "Keys",
    "Observed",
    "Reduction",
    "Window",
    "score_blocks",
    "score_jobs",
]

EPS = 1e-6  # METHODS: p / (1 - p + eps)
BLOCK_ELEMENTS = (
    1 << 20
)  # logits of one block: 4 MiB of float32, near the size of the caches that the passes over it go through

LOUD = 0.75  # up to here float32 loses no more than two digits of 1 - p and of a - v


@dataclass(frozen=True)
class Keys:
    """The scored keys' values of one KV head, prepared once for all blocks: values [c, d_v], and [c, d_v + 2] with ||v||^2 and 1 beside them.

    roots [G, d_v, d_v] and projected [G, c, d_v + 2]: the same for v R_h, where lengths after the output projection are asked.
    """

    values: Tensor
    extended: Tensor
    roots: Tensor | None = None
    projected: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, roots: Tensor | None = None) -> Keys:
        """Prepare values [c, d_v]."""
        return cls(
            values,
            _extended(values),
            roots,
            None if roots is None else torch.stack([_extended(values @ root) for root in roots]),
        )

    def first(self, count: int) -> Keys:
        """Only the first `count` keys."""
        if count == len(self.values):
            return self
        projected = None if self.projected is None else self.projected[:, :count]
        return Keys(self.values[:count], self.extended[:count], self.roots, projected)


def _extended(x: Tensor) -> Tensor:
    return torch.cat([x, x.square().sum(-1, keepdim=True), torch.ones_like(x[:, :1])], 1)


@dataclass(frozen=True)
class Block:
    """Some observation queries of one KV head against the keys they see; rows are (query head, query) pairs, head after head.

    weights [rows, c] are exp(logit - the row's largest), total [rows, 1] their sum over ALL visible keys, so p = weights / total; output
    [rows, d_v] is a_t over all visible keys. Where one key has p > LOUD, at most one per row, 1 - p and a - v cancel, so those are given
    apart: `loud` is (row, column) of each such key that is scored, with its odds p / (1 - p + eps) and its residual a - v [., d_v],
    computed from the sum over all OTHER keys.
    """

    weights: Tensor
    total: Tensor
    keys: Keys
    output: Tensor
    loud: tuple[Tensor, Tensor]
    loud_odds: Tensor
    loud_residual: Tensor

    def probability(self) -> Tensor:
        """p [rows, c]."""
        return self.weights / self.total

    def odds(self) -> Tensor:
        """p / (1 - p + eps) [rows, c]."""
        odds = torch.sub(self.total * (1.0 + EPS), self.weights)
        torch.div(self.weights, odds, out=odds)
        odds[self.loud] = self.loud_odds
        return odds

    def squared_distance(self) -> Tensor:
        """||a - v||^2 [rows, c], as one matrix product from ||v||^2 - 2<a, v> + ||a||^2; rounding can leave a small one below zero."""
        distance = torch.matmul(_against(self.output), self.keys.extended.T)
        distance[self.loud] = self.loud_residual.square().sum(-1)
        return distance

    def squared_distance_projected(self) -> Tensor:
        """||(a - v) W_h||_2^2 [rows, c], each query head after its own slice of the output projection."""
        roots, projected = self.keys.roots, self.keys.projected
        assert roots is not None and projected is not None
        row, column = self.loud
        group, each = len(roots), len(self.output) // len(roots)
        outputs = self.output.view(group, each, -1)
        distance = torch.cat(
            [torch.matmul(_against(outputs[h] @ roots[h]), projected[h].T) for h in range(group)]
        )  # heads one after another, as the rows are
        for h in range(group):
            own = row // each == h
            distance[row[own], column[own]] = (self.loud_residual[own] @ roots[h]).square().sum(-1)
        return distance

    def inner(self) -> Tensor:
        """<a, v> [rows, c]."""
        return torch.matmul(self.output, self.keys.values.T)


def _against(a: Tensor) -> Tensor:
    """The left side of a product with `Keys.extended` that makes squared distances: [rows, d_v] -> [rows, d_v + 2]."""
    return torch.cat([a * -2, torch.ones_like(a[:, :1]), a.square().sum(-1, keepdim=True)], dim=1)


Contribution = Callable[[Block], Tensor]
Finish = Callable[[Tensor], Tensor]


class Observed(Protocol):
    """Observation queries that can be gone through block by block, KV head by KV head."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """kv_heads, query heads per KV head, queries, scored keys."""
        ...

    def blocks(self, head: int) -> Iterator[tuple[int, int, Block]]:
        """(first query, end, block) of one KV head, in order."""
        ...


@dataclass(frozen=True)
class Job:
    """One kind of score: contribution(block) [rows, columns], one number per query head, query and key, reduced as `reduction` says.

    finish: applied to the [kv_heads, G, columns] left by the reduction over queries, for what belongs to whole query heads.
    """

    contribution: Contribution
    reduction: Reduction = SUM_MEAN
    finish: Finish | None = None


def score_blocks(
    observed: Observed, contribution: Contribution, reduction: Reduction = SUM_MEAN, finish: Finish | None = None
) -> Tensor:
    """Scores float32 [kv_heads, columns] of one job."""
    return score_jobs(observed, [Job(contribution, reduction, finish)])[0]


def score_jobs(observed: Observed, jobs: Sequence[Job]) -> list[Tensor]:
    """Scores float32 [kv_heads, columns] of every job; the attention is computed once for all of them."""
    kv_heads, group, m, columns = observed.shape
    done: list[list[Tensor]] = [[] for _ in jobs]
    for head in range(kv_heads):
        running: list[Running] = []
        for start, stop, block in observed.blocks(head):
            if not running:
                like = block.output
                running = [Running(job.reduction.queries, group, m, columns, like) for job in jobs]
            for job, state in zip(jobs, running, strict=True):
                state.add(job.contribution(block).view(group, stop - start, -1), start)
        for state, results in zip(running, done, strict=True):
            results.append(state.result())
    scores = []
    for job, results in zip(jobs, done, strict=True):
        total = torch.stack(results)
        if job.finish is not None:
            total = job.finish(total)
        scores.append(over_group(total, job.reduction.group).float())
    return scores


@dataclass(frozen=True)
class Window:
    """Observation queries of one layer and the keys they see, nothing known of their attention yet.

    q [kv_heads, G, m, d], k [kv_heads, n, d], v [kv_heads, n, d_v]: the queries belong to the last m keys, query t sees keys up to n - m + t.
    `columns`: only the first so many keys are scored. `positions` int64 [n] and `reach`: on sliding layers a query sees only keys less than
    `reach` positions back. `outputs` [kv_heads, G, m, d_v], if given, receives the attention outputs as the blocks go by.
    `roots` [kv_heads, G, d_v, d_v]: of the output projection, for scores that measure behind it (kernels/projection.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    columns: int | None = None
    positions: Tensor | None = None
    reach: int | None = None
    outputs: Tensor | None = None
    roots: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """kv_heads, query heads per KV head, queries, scored keys."""
        return (*self.q.shape[:3], self.k.shape[1] if self.columns is None else self.columns)

    def attend(self) -> Tensor:
        """Attention outputs [kv_heads, G, m, d_v] without any score, in float32 (float64 for float64 inputs)."""
        outputs = self.q.new_empty((*self.q.shape[:3], self.v.shape[-1]), dtype=_wide(self.q))
        for head in range(self.q.shape[0]):
            for _ in replace(self, columns=0, outputs=outputs, roots=None).blocks(head):
                pass
        return outputs

    def blocks(self, head: int) -> Iterator[tuple[int, int, Block]]:
        """(first query, end, block) of one KV head, in order."""
        _, group, m, columns = self.shape
        n = self.k.shape[1]
        rows = _rows(m, group * n, self.q)
        q, k, v = (part[head].to(_wide(part)) for part in (self.q, self.k, self.v))
        keys = Keys.of(v[:columns], None if self.roots is None else self.roots[head].to(v.dtype))
        for start in range(0, m, rows):
            stop = min(m, start + rows)
            seen = n - m + stop
            near = keys.first(min(columns, seen))
            block = self._block(q[:, start:stop], k[:seen], v[:seen], near, self._hidden(start, stop, seen))
            if self.outputs is not None:
                self.outputs[head, :, start:stop] = block.output.view(group, stop - start, -1)
            yield start, stop, block

    def _hidden(self, start: int, stop: int, seen: int) -> Tensor | None:
        """Which of the first `seen` keys lie beyond a sliding layer's reach, bool [rows, seen]; None on layers that see everything."""
        if self.reach is None or self.positions is None:
            return None
        first = self.k.shape[1] - self.q.shape[2]
        own = self.positions[first + start : first + stop]
        return (own.unsqueeze(1) - self.positions[:seen].unsqueeze(0)) >= self.reach

    def _block(self, q: Tensor, k: Tensor, v: Tensor, keys: Keys, hidden: Tensor | None) -> Block:
        group, rows, _ = q.shape
        seen, columns = k.shape[0], len(keys.values)
        logits = torch.matmul((q * self.scale).reshape(group * rows, -1), k.T)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        by_head = logits.view(group, rows, seen)
        if rows > 1:
            future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
            by_head[:, :, seen - rows :].masked_fill_(future, -torch.inf)
        if hidden is not None:
            by_head.masked_fill_(hidden, -torch.inf)
        weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1, keepdim=True)
        row = torch.nonzero(total.squeeze(-1) < 1 / LOUD).squeeze(-1)
        loud = weights.index_select(0, row)
        column = loud.max(-1).indices
        rest = loud.scatter_(-1, column.unsqueeze(-1), 0).sum(-1, keepdim=True)  # (1 - p) * total, without cancellation
        weights[row, column] = 0
        output = torch.matmul(weights, v)
        weights[row, column] = 1
        total[row] = 1 + rest
        others, own = output.index_select(0, row), v.index_select(0, column)
        output.index_add_(0, row, own).div_(total)
        scored = column < columns
        residual = (others - rest * own) / (1 + rest)
        return Block(
            weights=weights[:, :columns],
            total=total,
            keys=keys,
            output=output,
            loud=(row[scored], column[scored]),
            loud_odds=(1 / (rest + EPS * (1 + rest))).squeeze(-1)[scored],
            loud_residual=residual[scored],
        )


@dataclass(frozen=True)
class Attended:
    """Observation queries whose attention is done: outputs and log-sum-exps are known, so the scored keys are read once and no others.

    q [kv_heads, G, m, d]; k [kv_heads, c, d], v [kv_heads, c, d_v] the scored keys, all seen by every query; outputs [kv_heads, G, m, d_v] and
    log_sum_exp [kv_heads, G, m] over everything the queries see; roots as in `Window`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    outputs: Tensor
    log_sum_exp: Tensor
    roots: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """kv_heads, query heads per KV head, queries, scored keys."""
        return (*self.q.shape[:3], self.k.shape[1])

    def blocks(self, head: int) -> Iterator[tuple[int, int, Block]]:
        """(first query, end, block) of one KV head, in order."""
        _, group, m, columns = self.shape
        rows = _rows(m, group * columns, self.q)
        q, k, v, outputs = (part[head].to(_wide(part)) for part in (self.q, self.k, self.v, self.outputs))
        keys = Keys.of(v, None if self.roots is None else self.roots[head].to(v.dtype))
        for start in range(0, m, rows):
            stop = min(m, start + rows)
            output = outputs[:, start:stop].reshape(group * (stop - start), -1)
            logits = torch.matmul((q[:, start:stop] * self.scale).reshape(len(output), -1), k.T)
            p = logits.sub_(self.log_sum_exp[head, :, start:stop].reshape(-1, 1)).exp_()
            row = torch.nonzero(p.amax(-1) > LOUD).squeeze(-1)
            largest, column = p.index_select(0, row).max(-1)
            residual = output.index_select(0, row) - v.index_select(0, column)
            block = Block(
                weights=p,
                total=torch.ones_like(p[:, :1]),
                keys=keys,
                output=output,
                loud=(row, column),
                loud_odds=largest / (1 - largest).clamp_(min=0).add_(EPS),
                loud_residual=residual,
            )
            yield start, stop, block


def _rows(m: int, columns: int, like: Tensor) -> int:
    """Queries of one block; a GPU takes larger ones, since there each operation costs a launch and none has a cache to stay in."""
    elements = BLOCK_ELEMENTS * (32 if like.is_cuda else 1)
    return max(1, min(m, elements // max(1, columns)))


def _wide(x: Tensor) -> torch.dtype:
    """What is computed in: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
