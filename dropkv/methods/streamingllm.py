"""StreamingLLM (arXiv 2309.17453): the first 4 tokens and the most recent ones; s_j = position, the first 4 get n + 1. Positions are kept.

The paper numbers the kept tokens anew; here keys keep the rotation they were computed with, as in NVIDIA/kvpress without its re-rotation.
"""

import torch
from torch import Tensor

from dropkv.methods._base import LayerContext, Method

SINKS = 4


def scores(layer: LayerContext) -> Tensor:
    """[kv_heads, n]."""
    line = torch.arange(layer.n, dtype=torch.float32, device=layer.k.device)
    line[:SINKS] = layer.n + 1
    return line.expand(layer.k.shape[0], -1)


METHOD = Method("streamingllm", "the first 4 tokens and the latest", unobserved=scores, forced_last=0)
