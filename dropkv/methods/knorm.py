"""L2 norm (arXiv 2406.11430): s_j = -||k_j||_2: tokens with short keys tend to be looked at; no queries, nothing forced."""

import torch
from torch import Tensor

from dropkv.methods._base import LayerContext, Method


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n] from k [kv_heads, n, d]."""
    lengths: Tensor = layer.k.to(torch.promote_types(layer.k.dtype, torch.float32)).norm(dim=-1)
    return -lengths


METHOD = Method("knorm", "short keys", unobserved=scores, forced_last=0)
