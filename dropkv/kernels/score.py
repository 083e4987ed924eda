"""Scores of a window of observation queries: exact attention, then one number per KV head and key.

Plain torch, blocked over queries: nothing of size queries x keys x head_dim is ever made, K and V are never repeated per query head.
The computation is float32 (float64 for float64 inputs), whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from dropkv.kernels.reduce import MAX_MAX, SUM_MEAN, Reduction, Running, over_group

if TYPE_CHECKING:
    from dropkv.kernels.window_attend import Attention

__all__ = [
    "MAX_MAX",
    "SUM_MEAN",
    "Attended",
    "Block",
    "Job",
    "Keys",
    "Observed",
    "Reduction",
    "Score",
    "Window",
    "score_blocks",
    "score_jobs",
]

EPS = 1e-6  # METHODS: p / (1 - p + eps)
BLOCK_ELEMENTS = 1 << 20  # logits of one block: 4 MiB of float32, near the size of a CPU's caches
GPU_BLOCK_ELEMENTS = 1 << 26  # 256 MiB
CPU_HEADS = 1

LOUD = 0.75  # up to here float32 loses no more than two digits of 1 - p and of a - v


@dataclass(frozen=True)
class Keys:
    """The scored keys' values of some KV heads, prepared once for all blocks: values [h, c, d_v], and [h, c, d_v + 2] with ||v||^2 and 1 beside.

    roots [h, G, d_v, d_v] and projected [h, G, c, d_v + 2]: the same for v R, where lengths after the output projection are asked.
    """

    values: Tensor
    extended: Tensor
    roots: Tensor | None = None
    projected: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, roots: Tensor | None = None) -> Keys:
        """Prepare values [h, c, d_v]."""
        projected = None if roots is None else _extended(torch.matmul(values.unsqueeze(1), roots))
        return cls(values, _extended(values), roots, projected)

    def first(self, count: int) -> Keys:
        """Only the first `count` keys."""
        if count == self.values.shape[1]:
            return self
        projected = None if self.projected is None else self.projected[:, :, :count]
        return Keys(self.values[:, :count], self.extended[:, :count], self.roots, projected)


def _extended(x: Tensor) -> Tensor:
    return torch.cat([x, x.square().sum(-1, keepdim=True), torch.ones_like(x[..., :1])], -1)


@dataclass(frozen=True)
class Block:
    """Some observation queries of h KV heads against the keys they see; rows are (query head, query) pairs, query head after query head.

    weights [h, rows, c] are exp(logit - the row's largest), total [h, rows, 1] their sum over ALL visible keys, so p = weights / total; output
    [h, rows, d_v] is a_t over all visible keys. Where one key has p > LOUD, at most one per row, 1 - p and a - v cancel, so those are given
    apart: `loud` is (KV head, row, column) of each such key that is scored, with its odds p / (1 - p + eps) and its residual a - v [., d_v],
    computed from the sum over all OTHER keys. told [h, rows, 1]: what each query weighs where that is asked (dropkv/told.py), None: all alike.
    """

    weights: Tensor
    total: Tensor
    keys: Keys
    output: Tensor
    loud: tuple[Tensor, Tensor, Tensor]
    loud_odds: Tensor
    loud_residual: Tensor
    told: Tensor | None = None

    def probability(self) -> Tensor:
        """p [h, rows, c]."""
        return self.weights / self.total

    def odds(self) -> Tensor:
        """p / (1 - p + eps) [h, rows, c]."""
        odds = torch.sub(self.total * (1.0 + EPS), self.weights)
        torch.div(self.weights, odds, out=odds)
        odds[self.loud] = self.loud_odds
        return odds

    def squared_distance(self) -> Tensor:
        """||a - v||^2 [h, rows, c], as one matrix product from ||v||^2 - 2<a, v> + ||a||^2; rounding can leave a small one below zero."""
        distance = torch.matmul(_against(self.output), self.keys.extended.transpose(-1, -2))
        distance[self.loud] = self.loud_residual.square().sum(-1)
        return distance

    def squared_distance_projected(self) -> Tensor:
        """||(a - v) W_h||_2^2 [h, rows, c], each query head after its own slice of the output projection."""
        roots, projected = self.keys.roots, self.keys.projected
        assert roots is not None and projected is not None
        heads, rows, d = self.output.shape
        by_head = (heads, roots.shape[1], rows // roots.shape[1], d)
        outputs = torch.matmul(self.output.view(by_head), roots)
        distance = torch.matmul(_against(outputs), projected.transpose(-1, -2)).view(heads, rows, -1)
        residuals = torch.zeros_like(self.output)  # one row has one loud key at most
        residuals[self.loud[:2]] = self.loud_residual
        squares = torch.matmul(residuals.view(by_head), roots).square().sum(-1).view(heads, rows)
        distance[self.loud] = squares[self.loud[:2]]
        return distance

    def inner(self) -> Tensor:
        """<a, v> [h, rows, c]."""
        return torch.matmul(self.output, self.keys.values.transpose(-1, -2))


def _against(a: Tensor) -> Tensor:
    """The left side of a product with `Keys.extended` that makes squared distances: [..., d_v] -> [..., d_v + 2]."""
    return torch.cat([a * -2, torch.ones_like(a[..., :1]), a.square().sum(-1, keepdim=True)], dim=-1)


Contribution = Callable[[Block], Tensor]
Finish = Callable[[Tensor], Tensor]


class Observed(Protocol):
    """Observation queries that can be gone through block by block, some KV heads at a time."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """kv_heads, query heads per KV head, queries, scored keys."""
        ...

    def slabs(self) -> Iterator[slice]:
        """KV heads that are gone through together."""
        ...

    def blocks(self, heads: slice) -> Iterator[tuple[int, int, Block]]:
        """(first query, end, block) of some KV heads, in order."""
        ...


Weight = Literal["p", "odds", "squared odds", "along", "entropy", "step", "smoothed"]


@dataclass(frozen=True)
class Score:
    """A score that the kernel of window_score.py computes in one pass over K and V.

    weight: the first four of `Weight`: p; odds, p / (1 - p + eps) * ||a - v||; squared odds, its square; along, p <a, v>. over: sum over the
    queries and mean over the group's heads; max of all; l2, the root of the sum of squares over a head's queries, times a factor, then the mean
    over the heads.
    """

    weight: Weight
    over: Literal["sum", "max", "l2"] = "sum"

    @property
    def reads_values(self) -> bool:
        """Whether V and the attention outputs count."""
        return self.weight != "p"


@dataclass(frozen=True)
class Job:
    """One kind of score: contribution(block) [rows, columns], one number per query head, query and key, reduced as `reduction` says.

    finish: applied to the [kv_heads, G, columns] left by the reduction over queries, for what belongs to whole query heads.
    weight: what the contribution is called in a fused kernel, if there is one; factors [kv_heads, G, columns]: what finish multiplies with.
    """

    contribution: Contribution
    reduction: Reduction = SUM_MEAN
    finish: Finish | None = None
    weight: Weight | None = None
    factors: Tensor | None = None


def score_blocks(
    observed: Observed, contribution: Contribution, reduction: Reduction = SUM_MEAN, finish: Finish | None = None
) -> Tensor:
    """Scores float32 [kv_heads, columns] of one job."""
    return score_jobs(observed, [Job(contribution, reduction, finish)])[0]


def score_jobs(observed: Observed, jobs: Sequence[Job], documents: int = 1) -> list[Tensor]:
    """Scores float32 [kv_heads, columns] of every job; the attention is computed once for all of them.

    documents: the KV heads are those of so many documents, one document after another.
    """
    _, group, m, columns = observed.shape
    done: list[list[Tensor]] = [[] for _ in jobs]
    for heads in observed.slabs():
        running: list[Running] = []
        for start, stop, block in observed.blocks(heads):
            together = len(block.output)
            if not running:
                shape = (together, group, columns)
                running = [Running(job.reduction.queries, shape, m, block.output) for job in jobs]
            for job, state in zip(jobs, running, strict=True):
                state.add(job.contribution(block).view(together, group, stop - start, -1), start)
        for state, results in zip(running, done, strict=True):
            results.append(state.result())
    scores = []
    for job, results in zip(jobs, done, strict=True):
        total = torch.cat(results)
        if job.finish is not None:
            total = job.finish(total)
        scores.append(over_group(total, job.reduction.group, documents).float())
    return scores


@dataclass(frozen=True)
class Window:
    """Observation queries of one layer and the keys they see, nothing known of their attention yet.

    q [kv_heads, G, m, d], k [kv_heads, n, d], v [kv_heads, n, d_v]: the queries belong to the last m keys, query t sees keys up to n - m + t.
    `columns`: only the first so many keys are scored. `positions` int64 [n] and `reach`: on sliding layers a query sees only keys less than
    `reach` positions back. `outputs` [kv_heads, G, m, d_v], if given, receives the attention outputs as the blocks go by.
    `roots` [kv_heads, G, d_v, d_v]: of the output projection, for scores that measure behind it (kernels/projection.py).
    `attention`: what kernels/window_attend.py made of the queries, where it has, for the kernels that score.
    `told` [kv_heads, m]: what each query weighs, for scores that ask.
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
    attention: Attention | None = None
    told: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """kv_heads, query heads per KV head, queries, scored keys."""
        return (*self.q.shape[:3], self.k.shape[1] if self.columns is None else self.columns)

    def slabs(self) -> Iterator[slice]:
        """KV heads that are gone through together."""
        return _slabs(self.q)

    def attend(self) -> Tensor:
        """Attention outputs [kv_heads, G, m, d_v] without any score, in float32 (float64 for float64 inputs)."""
        outputs = self.q.new_empty((*self.q.shape[:3], self.v.shape[-1]), dtype=_wide(self.q))
        for heads in self.slabs():
            for _ in replace(self, columns=0, outputs=outputs, roots=None).blocks(heads):
                pass
        return outputs

    def blocks(self, heads: slice) -> Iterator[tuple[int, int, Block]]:
        """(first query, end, block) of some KV heads, in order."""
        _, group, m, columns = self.shape
        n = self.k.shape[1]
        q, k, v = (part[heads].to(_wide(part)) for part in (self.q, self.k, self.v))
        rows = _rows(m, len(q) * group * n, self.q)
        keys = Keys.of(v[:, :columns], None if self.roots is None else self.roots[heads].to(v.dtype))
        for start in range(0, m, rows):
            stop = min(m, start + rows)
            seen = n - m + stop
            near = keys.first(min(columns, seen))
            block = self._block(q[:, :, start:stop], k[:, :seen], v[:, :seen], near, self._hidden(start, stop, seen))
            if self.told is not None:
                block = replace(block, told=_by_row(self.told[heads, start:stop], group, q))
            if self.outputs is not None:
                self.outputs[heads, :, start:stop] = block.output.view(len(q), group, stop - start, -1)
            yield start, stop, block

    def _hidden(self, start: int, stop: int, seen: int) -> Tensor | None:
        """Which of the first `seen` keys lie beyond a sliding layer's reach, bool [rows, seen]; None on layers that see everything."""
        if self.reach is None or self.positions is None:
            return None
        first = self.k.shape[1] - self.q.shape[2]
        own = self.positions[first + start : first + stop]
        return (own.unsqueeze(1) - self.positions[:seen].unsqueeze(0)) >= self.reach

    def _block(self, q: Tensor, k: Tensor, v: Tensor, keys: Keys, hidden: Tensor | None) -> Block:
        heads, group, rows, _ = q.shape
        seen, columns = k.shape[1], keys.values.shape[1]
        logits = torch.matmul((q * self.scale).reshape(heads, group * rows, -1), k.transpose(1, 2))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        by_head = logits.view(heads, group, rows, seen)
        if rows > 1:
            future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
            by_head[..., seen - rows :].masked_fill_(future, -torch.inf)
        if hidden is not None:
            by_head.masked_fill_(hidden, -torch.inf)
        weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1, keepdim=True)
        flat = weights.view(-1, seen)
        index = torch.nonzero(total.view(-1) < 1 / LOUD).squeeze(-1)
        loud = flat.index_select(0, index)
        column = loud.max(-1).indices
        rest = loud.scatter_(-1, column.unsqueeze(-1), 0).sum(-1, keepdim=True)  # (1 - p) * total, without cancellation
        flat[index, column] = 0
        output = torch.matmul(weights, v)
        flat[index, column] = 1
        total.view(-1, 1)[index] = 1 + rest
        head, row = index // (group * rows), index % (group * rows)
        own = v[head, column]
        by_row = output.view(len(flat), output.shape[-1])
        others = by_row.index_select(0, index)
        by_row.index_add_(0, index, own)
        output.div_(total)
        odds, residual = 1 / (rest + EPS * (1 + rest)), (others - rest * own) / (1 + rest)
        if columns < seen:  # some visible keys are not scored
            scored = torch.nonzero(column < columns).squeeze(-1)
            head, row, column, odds, residual = (
                part.index_select(0, scored) for part in (head, row, column, odds, residual)
            )
        return Block(
            weights=weights[..., :columns],
            total=total,
            keys=keys,
            output=output,
            loud=(head, row, column),
            loud_odds=odds.squeeze(-1),
            loud_residual=residual,
        )


@dataclass(frozen=True)
class Attended:
    """Observation queries whose attention is done: outputs and log-sum-exps are known, so the scored keys are read once and no others.

    q [kv_heads, G, m, d]; k [kv_heads, c, d], v [kv_heads, c, d_v] the scored keys, all seen by every query; outputs [kv_heads, G, m, d_v] and
    log_sum_exp [kv_heads, G, m] over everything the queries see; roots and told as in `Window`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    outputs: Tensor
    log_sum_exp: Tensor
    roots: Tensor | None = None
    told: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """kv_heads, query heads per KV head, queries, scored keys."""
        return (*self.q.shape[:3], self.k.shape[1])

    def slabs(self) -> Iterator[slice]:
        """KV heads that are gone through together."""
        return _slabs(self.q)

    def blocks(self, heads: slice) -> Iterator[tuple[int, int, Block]]:
        """(first query, end, block) of some KV heads, in order."""
        _, group, m, columns = self.shape
        q, k, v, outputs = (part[heads].to(_wide(part)) for part in (self.q, self.k, self.v, self.outputs))
        rows = _rows(m, len(q) * group * columns, self.q)
        keys = Keys.of(v, None if self.roots is None else self.roots[heads].to(v.dtype))
        for start in range(0, m, rows):
            stop = min(m, start + rows)
            output = outputs[:, :, start:stop].reshape(len(q), group * (stop - start), -1)
            logits = torch.matmul((q[:, :, start:stop] * self.scale).reshape(*output.shape[:2], -1), k.transpose(1, 2))
            p = logits.sub_(self.log_sum_exp[heads, :, start:stop].reshape(*output.shape[:2], 1)).exp_()
            head, row = torch.nonzero(p.amax(-1) > LOUD, as_tuple=True)
            largest, column = p[head, row].max(-1)
            block = Block(
                weights=p,
                total=torch.ones_like(p[..., :1]),
                keys=keys,
                output=output,
                loud=(head, row, column),
                loud_odds=largest / (1 - largest).clamp_(min=0).add_(EPS),
                loud_residual=output[head, row] - v[head, column],
                told=None if self.told is None else _by_row(self.told[heads, start:stop], group, q),
            )
            yield start, stop, block


def _by_row(told: Tensor, group: int, like: Tensor) -> Tensor:
    """What queries weigh [h, queries] for the rows of a block [h, G * queries, 1]."""
    return told.to(like).repeat(1, group).unsqueeze(-1)


def _slabs(q: Tensor) -> Iterator[slice]:
    """All KV heads at once on a GPU, where each operation costs a launch; few on a CPU, whose caches hold few."""
    step = CPU_HEADS if q.device.type == "cpu" else max(1, len(q))
    return (slice(start, start + step) for start in range(0, len(q), step))


def _rows(m: int, columns: int, like: Tensor) -> int:
    """Queries of one block; a GPU takes larger ones, for the same reason."""
    elements = BLOCK_ELEMENTS if like.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    return max(1, min(m, elements // max(1, columns)))


def _wide(x: Tensor) -> torch.dtype:
    """What is computed in: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
