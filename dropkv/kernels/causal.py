"""Causal attention of a slice of the document against the keys so far."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from dropkv.kernels.merge import merge
from dropkv.kernels.score import Window

UNIT = (
    8192  # keys: cuDNN makes a plan for every new shape, which takes 70 ms, so long stretches are cut into few lengths
)
GRAIN = 1024  # queries of a last, shorter slice are filled up to a multiple of it, for the same reason
Attention = tuple[Tensor, Tensor]  # outputs [heads, s, d_v] and log-sum-exps float32 [heads, s]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, reach: int | None = None, softcap: float | None = None
) -> Tensor:
    """Attention outputs [heads, s, d_v] of the last s positions, q [heads, s, d], over all n, k [kv_heads, n, d] and v [kv_heads, n, d_v].

    `reach`: sliding layers see only keys less than so many positions back. Fused attention does the work, on a GPU without a mask and without
    repeated heads; soft-capped logits take the exact plain path.
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
    if fused_on_gpu(q, v):
        if reach is not None and n > reach:
            return flash(q, k, v, scale, causal=True, reach=reach)[0]
        if not _by_cudnn(q):
            return flash(q, k, v, scale, causal=True)[0]
        return attend_behind(q, k[:, : n - s], v[:, : n - s], k[:, n - s :], v[:, n - s :], scale)
    mask: Tensor | None = None
    if reach is not None or n != s:
        mask = _mask(s, n, reach, q)
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads != kv_heads
    )
    return out[0]


def attend_behind(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, scale: float) -> Tensor:
    """Attention outputs [heads, s, d_v] on a GPU of s tokens that stand behind keys k [kv_heads, n, d] and see all of them, and of their own
    those up to themselves; v [kv_heads, n, d_v], own_k and own_v [kv_heads, s, .] likewise.

    Own and other keys apart, since cuDNN's kernel, on a Hopper GPU twice as fast as flash attention, knows no causal mask that ends at the
    lower right.
    """
    by_cudnn, s = _by_cudnn(q), q.shape[1]
    if by_cudnn:
        missing = -s % (GRAIN if s > GRAIN else 128)
        q, own_k, own_v = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in (q, own_k, own_v))
    out, log_sum = (cudnn if by_cudnn else flash)(q, own_k, own_v, scale, causal=True)
    start = 0
    for length in pieces(k.shape[1]) if by_cudnn else [k.shape[1]]:
        if length:
            attend = cudnn if by_cudnn and length % GRAIN == 0 else flash
            keys = slice(start, start + length)
            log_sum = merge(out, log_sum, *attend(q, k[:, keys], v[:, keys], scale, causal=False))
            start += length
    return out[:, :s]


def pieces(n: int) -> list[int]:
    """Lengths that n keys are cut into: units times 1, 2 or 3 times a power of 4, and what is left."""
    lengths, units, size = [n % UNIT], n // UNIT, UNIT
    while units:
        lengths.append(units % 4 * size)
        units, size = units // 4, size * 4
    return [length for length in reversed(lengths) if length]


def fused_on_gpu(q: Tensor, v: Tensor) -> bool:
    """Whether the GPU's fused attention takes these: 16-bit numbers, heads of at most 256 dimensions, keys as wide as values."""
    d = q.shape[-1]
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and d == v.shape[-1] and d <= 256 and d % 8 == 0


def _by_cudnn(q: Tensor) -> bool:
    return cudnn_serves(q.device.index or 0, q.dtype, q.shape[-1])


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, reach: int | None = None) -> Attention:
    """PyTorch's flash attention, grouped heads as they are; causal aligns the last query with the last key."""
    if reach is None:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], 0.0, causal, False, scale=scale
        )
        return found[0][0], found[1][0]
    # The operator below takes [batch, tokens, heads, d].
    parts = (part.transpose(0, 1)[None] for part in (q, k, v))
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        *parts, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale, window_size_left=reach - 1, window_size_right=0
    )  # fmt: skip
    return out[0].transpose(0, 1), log_sum[0]


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Attention:
    """cuDNN's attention, grouped heads as they are; causal aligns the first query with the first key."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, causal, False, scale=scale
    )
    return found[0][0], found[1].view(q.shape[:2])


@functools.lru_cache
def cudnn_serves(device: int, dtype: torch.dtype, d: int) -> bool:
    """Whether cuDNN's attention runs here and is the fast one: on GPUs from Hopper on, tried once with few numbers."""
    if torch.cuda.get_device_capability(device)[0] < 9 or d > 128:
        return False
    q, k = (torch.zeros(heads, 64, d, dtype=dtype, device=torch.device("cuda", device)) for heads in (4, 2))
    try:
        return bool(torch.isfinite(cudnn(q, k, k, 1.0, causal=True)[1]).all())
    except RuntimeError:
        return False


def _mask(s: int, n: int, reach: int | None, like: Tensor) -> Tensor:
    if reach is None and like.is_cuda:
        bias: Tensor = causal_lower_right(s, n)  # dispatches to flash attention without a mask in memory
        return bias
    query = torch.arange(n - s, n, device=like.device).unsqueeze(1)
    key = torch.arange(n, device=like.device).unsqueeze(0)
    seen = key <= query
    return seen if reach is None else seen & (query - key < reach)
