"""DefensiveKV (arXiv 2510.13334): s_j = max(R_j, mean_j R_j) * N_j / sum_j N_j, N_j = mean over the group's heads of ||v_j W_O^h||_1 and
R_j = max over queries and the group's heads of p_tj, averaged over 5 neighbours and scaled back to each query's own mass.

The smallest set of tokens that with the forced ones receives 0.9 of the mean attention is kept first, at most kept - f tokens of a head; the
layer's heads share the remaining budget without a floor (alpha 0). What is safe depends on the budget, so such files cannot be shrunk.
The authors' code uses a window of 32 (--window 32), divides the norm by its sum over heads at each token instead of over tokens, and measures
the window's mass on the last tokens before it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dropkv.methods._base import MAX_MAX, Block, Job, LayerContext, LayerScores, Method, Reduction

NEIGHBOURS = 5
SAFE = 0.9


def smoothed(block: Block, power: int) -> Tensor:
    """p averaged over neighbouring keys that the query sees, every row scaled to its own sum [h, rows, c]."""
    p = block.probability()
    pooled = F.avg_pool1d(p, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)
    pooled.mul_(p > 0)  # nothing spills into the query's future
    return pooled.mul_(p.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=1e-30))


def worst_case(scores: LayerScores, context: LayerContext) -> LayerScores:
    """The least risk of any token is the head's average one; every token weighs what its projected value weighs."""
    risk = scores.raw.maximum(scores.raw.mean(-1, keepdim=True))
    sizes = context.value_sizes.float()
    return LayerScores(risk * (sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-30)), scores.beside)


def safe_first(method: Method, scores: LayerScores, kept: int, forced: Sequence[int]) -> Tensor:
    """Scores with the safe tokens of every head raised above all others."""
    ranked = method.pooled(scores.raw).clone()
    room = kept - len(forced)
    if scores.beside is None or room < 1:
        return ranked
    mass = scores.beside[0].clone()
    wanted = SAFE * mass.sum(-1, keepdim=True)
    index = torch.tensor(list(forced), dtype=torch.long, device=mass.device)
    wanted = wanted - mass[..., index].sum(-1, keepdim=True)
    mass[..., index] = -1
    order = torch.sort(mass, dim=-1, descending=True, stable=True)
    before = order.values.clamp(min=0).cumsum(-1) - order.values.clamp(min=0)
    safe = (before < wanted) & (order.values > 0)
    safe[..., room:] = False
    top = ranked.amax((-2, -1), keepdim=True) + 1
    return ranked.scatter(-1, order.indices, torch.where(safe, top, ranked.gather(-1, order.indices)))


METHOD = Method(
    "defensivekv",
    "the worst case of attention times the projected value's size",
    smoothed,
    reduction=MAX_MAX,
    rule="head-adaptive",
    alpha=0.0,
    beside=(Job(lambda block: block.probability(), Reduction("mean", "mean"), weight="p"),),
    finish=worst_case,
    ranked=safe_first,
    fused="smoothed",
    budget_bound=True,
    needs=frozenset({"output projection"}),
)
