"""New keys and values into the tails of their rows, in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def put(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor) -> None:
    """Write k, v [rows, kv_heads, d] into keys, values [slots, kv_heads, capacity, d] at slots, lengths int32 [rows], in one launch."""
    rows, kv_heads, d = k.shape
    d_v = v.shape[-1]
    width = triton.next_power_of_2(max(d, d_v))
    _put[(rows, kv_heads)](
        k, v, keys, values, slots, lengths, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), D=d, DV=d_v, B=width, num_warps=1,
    )  # fmt: skip


@triton.jit
def _put(
    K, V, KEYS, VALUES, SLOTS, LENGTHS, k_row, k_head, v_row, v_head, keys_row, keys_head, values_row, values_head,
    D: tl.constexpr, DV: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot, place = tl.load(SLOTS + row).to(tl.int64), tl.load(LENGTHS + row).to(tl.int64)
    width = tl.arange(0, B)
    k = tl.load(K + row * k_row + head * k_head + width, mask=width < D)
    tl.store(KEYS + slot * keys_row + head * keys_head + place * D + width, k, mask=width < D)
    v = tl.load(V + row * v_row + head * v_head + width, mask=width < DV)
    tl.store(VALUES + slot * values_row + head * values_head + place * DV + width, v, mask=width < DV)
