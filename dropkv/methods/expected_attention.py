"""Expected Attention (arXiv 2510.00636): s_j = mean over the group's heads of softmax_j(mu k_j scale + k_j' Sigma k_j scale^2 / 2) * ||v_j||_2.

mu and Sigma are mean and covariance (divided by the count) of a query head's queries before RoPE over the document without its first 4 tokens,
turned by the average rotation of the next 512 positions; the softmax runs over the document without its first 4 tokens, which are kept.
No queries observe: what a later question will look for is guessed from the document's own. NVIDIA/kvpress, where the authors' code lives, adds
1e-2 to the softmax and lets heads share the budget in its registry; the uniform rule without it is its class's default.
Alone, with `dropkv.methods.score`, the given queries are taken for the queries to come as they are.
"""

import torch
from torch import Tensor

from dropkv.kernels.moments import Moments
from dropkv.methods._base import LayerContext, Method

SINKS = 4
SLICE_ELEMENTS = 1 << 22  # of keys times covariance at once


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n]; the first 4 tokens, which are always kept, have the layer's largest score."""
    expected = layer.expected
    if expected is None:
        expected = Moments()
        expected.add(layer.window(projected=False).q.flatten(0, 1))
    kv_heads, n, d = layer.k.shape
    wide = torch.promote_types(layer.k.dtype, torch.float32)
    mean = expected.mean.to(wide).view(kv_heads, -1, d) * layer.scale
    spread = expected.covariance.to(wide).view(*mean.shape, d) * (layer.scale**2 / 2)
    first = min(SINKS, n - 1)
    k = layer.k[:, first:].to(wide)
    logits = k @ mean.transpose(1, 2)  # [kv_heads, keys, group]
    together = kv_heads if k.is_cuda else 1  # a CPU's caches hold few heads, a GPU pays for every launch
    rows = max(1, SLICE_ELEMENTS // (d * mean.shape[1]))
    for head in range(0, kv_heads, together):
        heads = slice(head, head + together)
        for start in range(0, n - first, rows):
            part = k[heads, start : start + rows]
            turned = part.unsqueeze(1) @ spread[heads]  # [heads, group, keys, d]
            logits[heads, start : start + rows] += (turned * part.unsqueeze(1)).sum(-1).transpose(1, 2)
    result = layer.k.new_zeros((kv_heads, n), dtype=wide)
    result[:, first:] = logits.softmax(1).mean(2) * layer.v[:, first:].to(wide).norm(dim=-1)
    result[:, :first] = result.max()
    return result


METHOD = Method(
    "expected-attention",
    "attention that queries like the document's would pay",
    unobserved=scores,
    forced_first=SINKS,
    forced_last=0,
    needs=frozenset({"query statistics"}),
)
