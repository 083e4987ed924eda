"""Control: uniform random scores from the seed, the same on every device."""

import torch
from torch import Tensor

from dropkv.methods._base import LayerContext, Method


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n] from the layer's seed."""
    heads = layer.k.shape[0] // layer.documents
    parts = [
        torch.rand((heads, layer.n), generator=torch.Generator().manual_seed(seed))
        for seed in (layer.seed, *layer.more_seeds)
    ]
    return torch.cat(parts).to(layer.k.device)


METHOD = Method("random", "a control: random tokens", unobserved=scores)
