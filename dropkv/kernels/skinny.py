"""Products of a row, or of a few, with large weight matrices, in Triton: bound by reading the weights, so several go into one launch.

Measured for one row (benchmarks/decode_gpu.py); from two on a library's matrix products are as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, nn


def products(x: Tensor, linears: Sequence[nn.Linear], *, columns: int = 8, depth: int = 512) -> list[Tensor]:
    """What one to three linear modules, all with a bias or none, make of x [rows, width], in one launch."""
    rows, width = x.shape
    outs = [x.new_empty(rows, one.out_features) for one in linears]
    weights = [one.weight for one in linears]
    biases = [one.bias for one in linears]
    counts = [one.out_features for one in linears]
    missing = 3 - len(linears)
    blocks = [triton.cdiv(count, columns) for count in counts]
    _products[(sum(blocks),)](
        x, *(weights + weights[:1] * missing), *[x if one is None else one for one in biases], *[x] * missing,
        *(outs + outs[:1] * missing), *(counts + [0] * missing), *(blocks + [0] * missing)[:2], x.stride(0),
        K=width, ROWS=rows, BR=triton.next_power_of_2(rows), BN=columns, BK=depth, BIAS=biases[0] is not None, num_warps=4,
    )  # fmt: skip
    return outs


@triton.jit
def _sums(
    X, w_place, w_mask, x_row, K: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """[BR, BN] products of all rows of X with the BN rows of a weight matrix at w_place [BN, 1]."""
    row, depth = tl.arange(0, BR), tl.arange(0, BK)
    acc = tl.zeros([BR, BN, BK], tl.float32)
    for start in range(0, K, BK):
        inside = start + depth < K
        w = tl.load(w_place + (start + depth)[None, :], mask=w_mask & inside[None, :], other=0.0)
        x = tl.load(
            X + row[:, None] * x_row + (start + depth)[None, :], mask=(row < ROWS)[:, None] & inside[None, :], other=0.0
        )
        acc += w.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
    return tl.sum(acc, 2)


@triton.jit
def _products(
    X, W0, W1, W2, B0, B1, B2, O0, O1, O2, n0, n1, n2, blocks0, blocks1, x_row,
    K: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    W, B, OUT, n = W0, B0, O0, n0
    if block >= blocks0 + blocks1:
        W, B, OUT, n = W2, B2, O2, n2
        block -= blocks0 + blocks1
    elif block >= blocks0:
        W, B, OUT, n = W1, B1, O1, n1
        block -= blocks0
    column = block * BN + tl.arange(0, BN)
    mask = (column < n)[:, None]
    sums = _sums(X, W + column[:, None].to(tl.int64) * K, mask, x_row, K, ROWS, BR, BN, BK)
    if BIAS:
        sums += tl.load(B + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    row = tl.arange(0, BR)
    place = row[:, None] * n + column[None, :]
    tl.store(OUT + place, sums.to(OUT.dtype.element_ty), mask=(row < ROWS)[:, None] & (column < n)[None, :])


def gated(x: Tensor, gate: nn.Linear, up: nn.Linear, *, columns: int = 4, depth: int = 512) -> Tensor:
    """silu(gate(x)) * up(x) for x [rows, width], in one launch; the modules have no biases."""
    rows, width = x.shape
    out = x.new_empty(rows, gate.out_features)
    _gated[(triton.cdiv(gate.out_features, columns),)](
        x, gate.weight, up.weight, out, gate.out_features, x.stride(0),
        K=width, ROWS=rows, BR=triton.next_power_of_2(rows), BN=columns, BK=depth, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gated(
    X, G, U, OUT, n, x_row, K: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row, depth = tl.arange(0, BR), tl.arange(0, BK)
    place = column[:, None].to(tl.int64) * K
    gates = tl.zeros([BR, BN, BK], tl.float32)
    ups = tl.zeros([BR, BN, BK], tl.float32)
    for start in range(0, K, BK):
        inside = start + depth < K
        mask = (column < n)[:, None] & inside[None, :]
        g = tl.load(G + place + (start + depth)[None, :], mask=mask, other=0.0)
        u = tl.load(U + place + (start + depth)[None, :], mask=mask, other=0.0)
        x = tl.load(
            X + row[:, None] * x_row + (start + depth)[None, :], mask=(row < ROWS)[:, None] & inside[None, :], other=0.0
        )
        wide = x.to(tl.float32)[:, None, :]
        gates += g.to(tl.float32)[None, :, :] * wide
        ups += u.to(tl.float32)[None, :, :] * wide
    kind = OUT.dtype.element_ty
    gate = tl.sum(gates, 2).to(kind).to(tl.float32)
    up = tl.sum(ups, 2).to(kind)
    opened = (gate / (1.0 + tl.exp(-gate))).to(kind)
    tl.store(OUT + row[:, None] * n + column[None, :], opened * up, mask=(row < ROWS)[:, None] & (column < n)[None, :])
