"""Control: uniform random scores from the seed, the same on every device."""

import torch
from torch import Tensor

from dropkv.methods._base import Method


def scores(k: Tensor, v: Tensor, seed: int) -> Tensor:
    """[kv_heads, n] from k [kv_heads, n, d]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(k.shape[0], k.shape[1], generator=generator).to(k.device)


METHOD = Method("random", "a control: random tokens", unobserved=scores)
