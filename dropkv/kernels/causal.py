"""Causal attention of a slice of the document against the keys so far."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from dropkv.kernels.score import Window


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, reach: int | None = None, softcap: float | None = None
) -> Tensor:
    """Attention outputs [heads, s, d_v] of the last s positions, q [heads, s, d], over all n, k [kv_heads, n, d] and v [kv_heads, n, d_v].

    `reach`: sliding layers see only keys less than so many positions back. PyTorch's fused attention does the work; soft-capped logits
    take the exact plain path.
    """
    heads, s, _ = q.shape
    kv_heads, n, _ = k.shape
    if softcap is not None:
        positions = torch.arange(n, device=k.device)
        window = Window(
            q.view(kv_heads, heads // kv_heads, s, -1), k, v, scale, softcap=softcap, positions=positions, reach=reach
        )
        return window.attend().reshape(heads, s, -1).to(q.dtype)
    if reach is not None:
        first = max(0, n - s + 1 - reach)  # no query of the slice sees further back
        k, v = k[:, first:], v[:, first:]
        n -= first
    mask: Tensor | None = None
    if reach is not None or n != s:
        mask = _mask(s, n, reach, q)
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads != kv_heads
    )
    return out[0]


def _mask(s: int, n: int, reach: int | None, like: Tensor) -> Tensor:
    if reach is None and like.is_cuda:
        bias: Tensor = causal_lower_right(s, n)  # dispatches to flash attention without a mask in memory
        return bias
    query = torch.arange(n - s, n, device=like.device).unsqueeze(1)
    key = torch.arange(n, device=like.device).unsqueeze(0)
    seen = key <= query
    return seen if reach is None else seen & (query - key < reach)
