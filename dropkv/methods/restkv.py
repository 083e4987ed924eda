"""ReST-KV (arXiv 2605.08840): s_j = mean over the group's heads of e_m, i_t = p_tj / (1 - p_tj + eps) * ||(a_t - v_j) W_O^h||_2,
e_1 = i_1, e_t = 0.7 e_(t-1) + 0.3 i_t, oldest query first; then averaged over a window that follows where the queries look.

The window: with D the mean position of the kept - f best keys of the first half of the queries minus that of the second half, it is
max(5, 2 floor(|D| / 2000) + 1) wide and shifted by floor(|D| / 2000) towards where the queries came from; edges are repeated. Since it depends
on the budget, smaller budgets keep no subset of larger ones and such files cannot be shrunk; those made with replays or several questions, which
pool by max 5, can.
This is the paper's form. Most of the authors' scripts average p over the queries first (mode "after") and leave the window's own values out of
a; they work per query head, use a kernel of at least 21 on RULER (--pool 21), and shift by one where D is exactly 0, which is not done here.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dropkv.kernels.score import Observed
from dropkv.methods._base import Block, LayerScores, Method, Pool, Reduction

SCALE = 2000  # tokens of drift that widen the window by one on each side


def step_length(block: Block, power: int) -> Tensor:
    """p / (1 - p + eps) * ||(a - v) W_O^h||_2 [h, rows, c]."""
    return block.odds().mul_(block.squared_distance_projected().clamp_(min=0).sqrt_())


def drift(queries: Observed) -> Tensor:
    """[1, kv_heads, n]: at place c - 1, D for the c best keys of every query, all query heads of a KV head taken together."""
    _, group, m, n = queries.shape
    early = m // 2
    found = []
    for heads in queries.slabs():
        total: Tensor | None = None
        for start, stop, block in queries.blocks(heads):
            p = F.pad(block.probability(), (0, n - block.weights.shape[-1]), value=-1.0)  # keys yet unseen come last
            best = torch.sort(p, dim=-1, descending=True, stable=True).indices.double()
            places = best.cumsum(-1).view(len(p), group, stop - start, n).sum(1)
            signs = [1 / early if row < early else 1 / (early - m) for row in range(start, stop)]
            part = torch.tensor(signs, dtype=torch.float64, device=p.device) @ places
            total = part if total is None else total + part
        assert total is not None
        counts = group * torch.arange(1, n + 1, device=total.device)
        found.append((total / counts if early else torch.zeros_like(total)).float())
    return torch.cat(found).unsqueeze(0)


def follow(method: Method, scores: LayerScores, kept: int, forced: Sequence[int]) -> Tensor:
    """Scores averaged over each KV head's own window."""
    best = kept - len(forced)
    if method.pool is None or method.pool.kind != "drift" or scores.beside is None or best < 1:
        return method.pooled(scores.raw)
    rows = scores.raw.reshape(-1, scores.raw.shape[-1])
    far = scores.beside[0, ..., best - 1].flatten().tolist()
    windows = [(max(method.pool.size, 2 * int(abs(d) // SCALE) + 1), math.floor(d / SCALE) + (d < 0)) for d in far]
    pooled = torch.empty_like(rows)
    for width, shift in sorted(set(windows)):
        own = torch.tensor([window == (width, shift) for window in windows], device=rows.device)
        padded = F.pad(rows[own].unsqueeze(1), (width // 2 - shift, width // 2 + shift), mode="replicate")
        pooled[own] = F.avg_pool1d(padded, width, stride=1).squeeze(1)
    return pooled.view(scores.raw.shape)


METHOD = Method(
    "restkv",
    "how far the projected output would move, newest queries first",
    step_length,
    reduction=Reduction("ema", "mean"),
    pool=Pool("drift", 5),
    beside_window=drift,
    ranked=follow,
    projected=True,
    fused="step",
    needs=frozenset({"output projection"}),
)
