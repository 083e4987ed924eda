"""The small steps of a decoder layer between its products, one Triton kernel each, for a few rows; rounded where transformers rounds."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


def add_norm(stream: Tensor, delta: Tensor | None, norm: Any) -> Tensor:
    """RMSNorm of stream [rows, width], to which delta is added first, in place. norm: a module with `weight` and `variance_epsilon`."""
    rows, width = stream.shape
    out = stream.new_empty(rows, width)
    _add_norm[(rows,)](
        stream, stream if delta is None else delta, norm.weight, out, norm.variance_epsilon, stream.stride(0),
        WIDTH=width, B=triton.next_power_of_2(width), ADD=delta is not None, num_warps=8 if width >= 2048 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    """x float32 of one row, whose rounded shares are multiplied by the weight in its type."""
    share = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    return share.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _add_norm(X, DELTA, WEIGHT, OUT, eps, x_row, WIDTH: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    mask = place < WIDTH
    x = tl.load(X + row * x_row + place, mask=mask, other=0.0)
    weight = tl.load(WEIGHT + place, mask=mask, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(DELTA + row * WIDTH + place, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(X + row * x_row + place, x, mask=mask)
    out = _normed(x.to(tl.float32), weight, eps, WIDTH)
    tl.store(OUT + row * WIDTH + place, out.to(x.dtype), mask=mask)


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) * ups, [rows, width]."""
    out = gates.new_empty(gates.shape)
    count = out.numel()
    _gate[(triton.cdiv(count, 1024),)](gates, ups, out, count, B=1024, num_warps=4)
    return out


@triton.jit
def _gate(G, U, OUT, count, B: tl.constexpr):
    place = tl.program_id(0) * B + tl.arange(0, B)
    g = tl.load(G + place, mask=place < count, other=0.0)
    u = tl.load(U + place, mask=place < count, other=0.0)
    wide = g.to(tl.float32)
    open_ = (wide / (1.0 + tl.exp(-wide))).to(g.dtype)
    tl.store(OUT + place, open_ * u, mask=place < count)


def rotate_and_put(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    q_norm: Any,
    k_norm: Any,
) -> Tensor:
    """Rotated queries [rows, heads, d] of q. Rotated keys of k and values v [rows, kv_heads, d] are put into keys, values [slots, kv_heads,
    capacity, d] at slots, lengths int32 [rows]. cos, sin [rows, d]. q_norm, k_norm: norms of each head before the rotation, as in Qwen3, or None."""
    rows, heads, d = q.shape
    kv_heads, d_v = v.shape[1], v.shape[2]
    out = q.new_empty(rows, heads, d)
    normed = q_norm is not None and k_norm is not None
    _rotate[(rows, heads + kv_heads)](
        q, k, v, cos, sin, q_norm.weight if normed else q, k_norm.weight if normed else q, out, keys, values, slots, lengths,
        q_norm.variance_epsilon if normed else 0.0, cos.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, KV=kv_heads, D=d, DV=d_v, B=triton.next_power_of_2(max(d, d_v)), NORM=normed, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    Q, K, V, COS, SIN, Q_WEIGHT, K_WEIGHT, OUT, KEYS, VALUES, SLOTS, LENGTHS, eps, c_row, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.arange(0, B)
    mask = width < D
    other = tl.where(width < D // 2, width + D // 2, width - D // 2)
    other = tl.where(mask, other, 0)
    is_query = number < HEADS
    head = tl.where(is_query, number, number - HEADS).to(tl.int64)
    base = tl.where(is_query, (row * HEADS + head) * D, (row * KV + head) * D)
    if is_query:
        x = tl.load(Q + base + width, mask=mask, other=0.0)
        turned = tl.load(Q + base + other, mask=mask, other=0.0)
    else:
        x = tl.load(K + base + width, mask=mask, other=0.0)
        turned = tl.load(K + base + other, mask=mask, other=0.0)
    if NORM:
        weights = Q_WEIGHT
        if not is_query:
            weights = K_WEIGHT
        rate = tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 0) / D + eps)
        weight = tl.load(weights + width, mask=mask, other=0.0).to(tl.float32)
        turned_weight = tl.load(weights + other, mask=mask, other=0.0).to(tl.float32)
        kind = x.dtype
        x = ((x.to(tl.float32) * rate).to(kind).to(tl.float32) * weight).to(kind)
        turned = ((turned.to(tl.float32) * rate).to(kind).to(tl.float32) * turned_weight).to(kind)
    cos = tl.load(COS + row * c_row + width, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(SIN + row * c_row + width, mask=mask, other=0.0).to(tl.float32)
    sign = tl.where(width < D // 2, -1.0, 1.0)
    first = (x.to(tl.float32) * cos).to(x.dtype)
    second = (turned.to(tl.float32) * sign * sin).to(x.dtype)
    y = (first.to(tl.float32) + second.to(tl.float32)).to(x.dtype)
    if is_query:
        tl.store(OUT + base + width, y, mask=mask)
    else:
        slot, place = tl.load(SLOTS + row).to(tl.int64), tl.load(LENGTHS + row).to(tl.int64)
        tl.store(KEYS + slot * k_row + head * k_head + place * D + width, y, mask=mask)
        v = tl.load(V + (row * KV + head) * DV + width, mask=width < DV, other=0.0)
        tl.store(VALUES + slot * v_row + head * v_head + place * DV + width, v, mask=width < DV)
