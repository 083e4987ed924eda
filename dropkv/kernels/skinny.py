"""Products of one row with large weight matrices, in Triton: bound by reading the weights, so several matrices go into one launch.

From two rows on a library's matrix products are as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, nn


def products(x: Tensor, linears: Sequence[nn.Linear], *, columns: int = 8, depth: int = 512) -> list[Tensor]:
    """What one to three linear modules, all with a bias or none, make of x [1, width], in one launch."""
    outs = [x.new_empty(1, one.out_features) for one in linears]
    weights = [one.weight for one in linears]
    counts = [one.out_features for one in linears]
    missing = 3 - len(linears)
    blocks = [triton.cdiv(count, columns) for count in counts]
    _products[(sum(blocks),)](
        x, *(weights + weights[:1] * missing), *[x if one.bias is None else one.bias for one in linears], *[x] * missing,
        *(outs + outs[:1] * missing), *(counts + [0] * missing), *(blocks + [0] * missing)[:2],
        K=x.shape[1], BN=columns, BK=depth, BIAS=linears[0].bias is not None, num_warps=4,
    )  # fmt: skip
    return outs


@triton.jit
def _products(
    X, W0, W1, W2, B0, B1, B2, O0, O1, O2, n0, n1, n2, blocks0, blocks1,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    W, B, OUT, n = W0, B0, O0, n0
    if block >= blocks0 + blocks1:
        W, B, OUT, n = W2, B2, O2, n2
        block -= blocks0 + blocks1
    elif block >= blocks0:
        W, B, OUT, n = W1, B1, O1, n1
        block -= blocks0
    column, depth = block * BN + tl.arange(0, BN), tl.arange(0, BK)
    place = W + column[:, None].to(tl.int64) * K
    acc = tl.zeros([BN, BK], tl.float32)
    for start in range(0, K, BK):
        inside = start + depth < K
        w = tl.load(place + (start + depth)[None, :], mask=(column < n)[:, None] & inside[None, :], other=0.0)
        x = tl.load(X + start + depth, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    sums = tl.sum(acc, 1)
    if BIAS:
        sums += tl.load(B + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(OUT + column, sums.to(OUT.dtype.element_ty), mask=column < n)


def gated(x: Tensor, gate: nn.Linear, up: nn.Linear, *, columns: int = 4, depth: int = 1024) -> Tensor:
    """silu(gate(x)) * up(x) for x [1, width], in one launch; the modules have no biases."""
    out = x.new_empty(1, gate.out_features)
    _gated[(triton.cdiv(gate.out_features, columns),)](
        x, gate.weight, up.weight, out, gate.out_features, K=x.shape[1], BN=columns, BK=depth, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gated(X, G, U, OUT, n, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    column, depth = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    place = column[:, None].to(tl.int64) * K
    gates = tl.zeros([BN, BK], tl.float32)
    ups = tl.zeros([BN, BK], tl.float32)
    for start in range(0, K, BK):
        inside = start + depth < K
        mask = (column < n)[:, None] & inside[None, :]
        g = tl.load(G + place + (start + depth)[None, :], mask=mask, other=0.0)
        u = tl.load(U + place + (start + depth)[None, :], mask=mask, other=0.0)
        x = tl.load(X + start + depth, mask=inside, other=0.0).to(tl.float32)[None, :]
        gates += g.to(tl.float32) * x
        ups += u.to(tl.float32) * x
    kind = OUT.dtype.element_ty
    gate = tl.sum(gates, 1).to(kind).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(kind)
    tl.store(OUT + column, opened * tl.sum(ups, 1).to(kind), mask=column < n)
