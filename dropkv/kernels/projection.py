"""Lengths after the output projection: what a value, or a step of a head's output, is worth in the residual stream.

`wo` is the output projection as nn.Linear stores it, [model dim, heads * d_v]; W_h is the d_v x model dim slice of query head h.
||x W_h||_2 needs only the d_v x d_v Gram matrix G_h = W_h W_h^T; the L1 norm needs the product itself, made for a few keys at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRODUCT_ELEMENTS = 1 << 22  # of one slice's product of values and projection, 16 MiB of float32


def head_slices(wo: Tensor, kv_heads: int, d_v: int) -> Tensor:
    """W_h of every query head, [kv_heads, G, d_v, model dim], a view of `wo`."""
    return wo.T.reshape(kv_heads, -1, d_v, wo.shape[0])


def roots(wo: Tensor, kv_heads: int, d_v: int) -> Tensor:
    """R_h [kv_heads, G, d_v, d_v] with G_h = R_h R_h^T, so that ||x W_h||_2 = ||x R_h||_2; float32 (float64 for float64 weights)."""
    slices = head_slices(wo, kv_heads, d_v).double()
    gram = slices @ slices.transpose(-1, -2)
    root, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed.any()):  # a head that cannot write in every direction
        values, vectors = torch.linalg.eigh(gram)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    narrowed: Tensor = root.to(torch.promote_types(wo.dtype, torch.float32))
    return narrowed


def l2_norms(v: Tensor, root: Tensor) -> Tensor:
    """||v_j W_h||_2 [kv_heads, G, n] for v [kv_heads, n, d_v] and R_h [kv_heads, G, d_v, d_v]."""
    kv_heads, group, d_v, _ = root.shape
    norms = root.new_empty((kv_heads, group, v.shape[1]))
    rows = _rows(kv_heads * group * d_v, v)
    for start in range(0, v.shape[1], rows):
        part = v[:, None, start : start + rows].to(root.dtype)
        norms[:, :, start : start + rows] = torch.matmul(part, root).norm(dim=-1)
    return norms


def mean_l1_norms(v: Tensor, wo: Tensor, documents: int = 1) -> Tensor:
    """The group's mean of ||v_j W_h||_1 [kv_heads, n] for v [kv_heads, n, d_v]; the KV heads are those of so many documents."""
    kv_heads, n, d_v = v.shape
    wide = torch.promote_types(v.dtype, torch.float32)
    slices = head_slices(wo, kv_heads // documents, d_v).to(wide)
    own = v.view(documents, -1, n, d_v)
    norms = v.new_zeros(own.shape[:3], dtype=wide)
    rows = _rows(kv_heads * wo.shape[0], v)
    for start in range(0, n, rows):
        part = own[:, :, start : start + rows].to(wide)
        for one in slices.unbind(1):
            norms[:, :, start : start + rows] += torch.matmul(part, one).abs().sum(-1)
    return norms.view(kv_heads, n) / slices.shape[1]


def _rows(width: int, like: Tensor) -> int:
    """Keys of one slice, of which each makes `width` numbers."""
    elements = PRODUCT_ELEMENTS if like.device.type == "cpu" else 16 * PRODUCT_ELEMENTS
    return max(1, elements // width)
