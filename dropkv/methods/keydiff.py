"""KeyDiff (arXiv 2504.15364): s_j = -cos(k_j, mean over i of k_i / ||k_i||), on keys after RoPE; no queries, nothing forced.

The paper works block by block while the document is read; here, as in NVIDIA/kvpress, once at its end. Some texts take the mean of the raw keys.
"""

from torch import Tensor

from dropkv.methods._base import LayerContext, Method, unit


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n] from k [kv_heads, n, d]."""
    directions = unit(layer.k)
    return -(directions * unit(directions.mean(1, keepdim=True))).sum(-1)


METHOD = Method("keydiff", "keys unlike the average key", unobserved=scores, forced_last=0)
