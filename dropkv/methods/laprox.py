"""LaProx (arXiv 2605.07234): s_j = mean over the group's heads of sqrt(sum_t p_tj^2) * ||v_j W_O^h||_2, average-pooled, over the layer's sum.

Dividing by the layer's sum over all heads and tokens makes scores comparable, so all layers and heads share one budget (model-wide, alpha 0).
The weight is that of column-row sampling for the product of attention and projected values. No public code is known; the paper leaves open
how the group's heads meet the projection, here whole scores are averaged.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.methods._base import LayerContext, LayerScores, Method, Pool, Reduction, probability


def lengths(context: LayerContext) -> Tensor:
    """||v_j W_O^h||_2 [kv_heads, G, n]."""
    return context.value_lengths


def shares(method: Method, scores: LayerScores, kept: int, forced: Sequence[int]) -> Tensor:
    """Pooled scores as shares of the layer's sum."""
    pooled = method.pooled(scores.raw)
    total = pooled.sum((-2, -1), keepdim=True)
    return pooled / torch.where(total > 0, total, 1)


METHOD = Method(
    "laprox",
    "attention times the projected value's length, all layers share",
    probability,
    reduction=Reduction("l2", "mean"),
    pool=Pool("avg", 7),
    rule="model-wide",
    alpha=0.0,
    weigh=lengths,
    ranked=shares,
    needs=frozenset({"output projection"}),
)
