"""StreamingLLM (arXiv 2309.17453): the first 4 tokens and the most recent ones; s_j = position, the first 4 get n + 1. Positions are kept."""

import torch
from torch import Tensor

from dropkv.methods._base import Method

SINKS = 4


def scores(k: Tensor, v: Tensor, seed: int) -> Tensor:
    """[kv_heads, n] from k [kv_heads, n, d]."""
    n = k.shape[1]
    line = torch.arange(n, dtype=torch.float32, device=k.device)
    line[:SINKS] = n + 1
    return line.expand(k.shape[0], n)


METHOD = Method("streamingllm", "the first 4 tokens and the latest", unobserved=scores, forced_last=0)
