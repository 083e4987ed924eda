"""The L1 length of every value behind the output projection in one Triton kernel: the projected values are never written.

The plain-torch twin is `dropkv.kernels.projection.mean_l1_norms`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropkv.kernels.window_attend import precision_of, tile_of, width_of


def value_sizes(v: Tensor, wo: Tensor, documents: int = 1) -> Tensor:
    """The group's mean of ||v_j W_h||_1, float32 [kv_heads, n], for v [kv_heads, n, d_v] and wo [model dim, heads * d_v] of the same type; the
    KV heads are those of so many documents. The last dimensions must be dense."""
    kv_heads, n, d_v = v.shape
    own = kv_heads // documents
    group = wo.shape[1] // d_v // own
    out = torch.empty((kv_heads, n), dtype=torch.float32, device=v.device)
    keys = 64 if d_v <= 128 else 32
    _sizes[(triton.cdiv(n, keys), kv_heads)](
        v, wo, out, v.stride(0), v.stride(1), wo.stride(0), n, wo.shape[0], own, group,
        DV=d_v, BDV=width_of(d_v), BN=keys, BC=64, PRECISION=precision_of(v), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n", "own", "group"])
def _sizes(
    V, WO, OUT, v_head, v_key, w_row, n, model, own, group,
    DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    width = tl.arange(0, BDV)
    v = tile_of(V + head * v_head, v_key, lines, n, width, DV, BDV)
    total = tl.zeros([BN], tl.float32)
    for part in range(0, group):
        base = WO + ((head % own) * group + part) * DV
        for start in range(0, model, BC):
            w = tile_of(base, w_row, start + tl.arange(0, BC), model, width, DV, BDV)
            total += tl.sum(tl.abs(tl.dot(v, tl.trans(w), input_precision=PRECISION)), 1)
    tl.store(OUT + head * n + lines, total / group, mask=lines < n)
