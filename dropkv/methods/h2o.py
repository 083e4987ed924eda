"""H2O (arXiv 2306.14048): s_j = mean over the group's heads of the sum over ALL document queries t of p_tj; half of the budget is the newest.

f = ceil(kept / 2) newest entries, the rest by score. The sum is collected slice by slice beside the prefill, so no n x n matrix is ever held;
it costs a second pass of attention. A sum favours early tokens; NVIDIA/kvpress divides by the number of queries that see a token and forces
no newest ones. The authors' code takes both ratios from a config and only masks what it drops.
"""

from torch import Tensor

from dropkv.kernels.score import score_blocks
from dropkv.methods._base import LayerContext, Method, probability


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n] attention received; of the window alone where nothing else was collected."""
    if layer.attention is not None:
        return layer.attention
    return score_blocks(layer.window(projected=False), lambda block: probability(block, 1))


METHOD = Method(
    "h2o",
    "attention of all tokens, and the newest half",
    unobserved=scores,
    forced_last=0,
    recent_half=True,
    needs=frozenset({"all queries"}),
)
