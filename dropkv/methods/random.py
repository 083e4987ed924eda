"""Control: uniform random scores from the seed, the same on every device."""

import torch
from torch import Tensor

from dropkv.methods._base import LayerContext, Method


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n] from the layer's seed."""
    generator = torch.Generator().manual_seed(layer.seed)
    return torch.rand(layer.k.shape[:2], generator=generator).to(layer.k.device)


METHOD = Method("random", "a control: random tokens", unobserved=scores)
