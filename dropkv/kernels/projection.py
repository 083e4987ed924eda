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
    values = v.to(root.dtype)
    return torch.stack(
        [torch.stack([(own @ one).norm(dim=-1) for one in roots]) for own, roots in zip(values, root, strict=True)]
    )


def mean_l1_norms(v: Tensor, wo: Tensor) -> Tensor:
    """The group's mean of ||v_j W_h||_1 [kv_heads, n] for v [kv_heads, n, d_v]."""
    slices = head_slices(wo, v.shape[0], v.shape[-1])
    wide = torch.promote_types(v.dtype, torch.float32)
    rows = max(1, PRODUCT_ELEMENTS // wo.shape[0])
    norms = v.new_zeros(v.shape[:2], dtype=wide)
    for head, own in enumerate(slices):
        for one in own:
            weight = one.to(wide)
            for start in range(0, v.shape[1], rows):
                norms[head, start : start + rows] += (v[head, start : start + rows].to(wide) @ weight).abs().sum(-1)
    return norms / slices.shape[1]
