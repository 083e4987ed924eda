"""Attention of the first tokens of many masked rows, in one Triton kernel; for the accuracy bench.

A row's tokens look at what the row keeps of its document and at each other. All of a row's queries of a KV head keep the same entries, so their
positions are written once, and the kernel reads those entries alone: at small budgets few of many. What `masked_decode` is for one token. The
plain-torch twin is `dropkv.bench.masked_run.attention_with_sums`, called for both parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropkv.kernels.window_attend import width_of

LOG2E = 1.4426950408889634


def kept_positions(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Positions int16 or int32 [rows, kv_heads, n] of the true entries of keep bool [rows, kv_heads, n] in order, and how many there are, int32
    [rows, kv_heads]; the last dimension of keep must be dense.

    What stands behind the last of them is of no meaning.
    """
    n = keep.shape[-1]
    positions = torch.empty(keep.shape, dtype=torch.int16 if n < 1 << 15 else torch.int32, device=keep.device)
    counts = torch.empty(keep.shape[:-1], dtype=torch.int32, device=keep.device)
    _positions[keep.shape[:2]](
        keep.view(torch.uint8), positions, counts, keep.stride(0), keep.stride(1), n, B=1024, num_warps=4
    )
    return positions, counts


def masked_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    seen: Tensor,
    counts: Sequence[int],
    *,
    scale: float,
    lines: int = 64,
    columns: int | None = None,
    warps: int = 4,
    stages: int = 2,
) -> Tensor:
    """Attention outputs [rows in all, heads, t, d_v] of t tokens per row, q [rows in all, heads, t, d].

    k, v [documents, kv_heads, n, d]; keep bool [rows in all, kv_heads, n]; counts: the rows of every document, which stand together. tail_k,
    tail_v [rows in all, kv_heads, capacity, d] and seen bool [rows in all, t, reach <= capacity]: which tail tokens each token sees, at least
    one where its output is of meaning. k, v and `seen` must be contiguous, the last dimensions of the others dense.
    """
    total, heads, t, d = q.shape
    kv_heads, n, d_v = v.shape[1:]
    group = heads // kv_heads
    out = torch.empty((total, heads, t, d_v), dtype=v.dtype, device=q.device)
    positions, found = kept_positions(keep)
    owners = [document for document, count in enumerate(counts) for _ in range(count)]
    if columns is None:
        columns = 32 if max(d, d_v) > 128 or q.dtype == torch.float32 else 64
    _attend[(triton.cdiv(t * group, lines), kv_heads, total)](
        q, k, v, positions, found, torch.tensor(owners, dtype=torch.int32, device=q.device), tail_k, tail_v, seen.view(torch.uint8), out,
        t, n, kv_heads, seen.shape[2], scale * LOG2E,
        q.stride(0), q.stride(1), q.stride(2), tail_k.stride(0), tail_k.stride(1), tail_k.stride(2),
        tail_v.stride(0), tail_v.stride(1), tail_v.stride(2),
        GROUP=group, D=d, DV=d_v, BD=width_of(d), BDV=width_of(d_v), BM=lines, BN=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n"])
def _positions(KEEP, POSITIONS, COUNTS, k_row, k_head, n, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    keep = KEEP + tl.program_id(0).to(tl.int64) * k_row + tl.program_id(1) * k_head
    found = 0
    for start in range(0, n, B):
        place = start + tl.arange(0, B)
        kept = (tl.load(keep + place, mask=place < n, other=0) != 0).to(tl.int32)
        rank = found + tl.cumsum(kept, 0) - 1
        tl.store(POSITIONS + row * n + rank, place.to(POSITIONS.dtype.element_ty), mask=kept != 0)
        found += tl.sum(kept, 0)
    tl.store(COUNTS + row, found)


@triton.jit
def _more(q, k, v, s, biggest, total, acc):
    """Keys and values of a tile into the running softmax; s: their logits, -inf for what is hidden."""
    new = tl.maximum(biggest, tl.max(s, 1))
    weights = tl.exp2(s - new[:, None])
    turn = tl.exp2(biggest - new)
    acc = tl.dot(weights.to(v.dtype), v, acc * turn[:, None], input_precision="ieee")
    return new, total * turn + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["t", "n", "reach"])
def _attend(
    Q, K, V, POSITIONS, COUNTS, OWNERS, TAIL_K, TAIL_V, SEEN, OUT, t, n, kv_heads, reach, scale,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    line = tl.program_id(0) * BM + tl.arange(0, BM)
    token, real = line // GROUP, line < t * GROUP
    head = kv_head * GROUP + line % GROUP
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    place = row * q_row + head[:, None].to(tl.int64) * q_head + token[:, None].to(tl.int64) * q_token + width[None, :]
    q = tl.load(Q + place, mask=real[:, None] & (width < D)[None, :], other=0.0)
    biggest = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)

    which = tl.load(OWNERS + row).to(tl.int64) * kv_heads + kv_head  # document and KV head
    mine = row * kv_heads + kv_head
    count = tl.load(COUNTS + mine)
    for start in range(0, count, BN):
        column = start + tl.arange(0, BN)
        inside = column < count
        at = which * n + tl.load(POSITIONS + mine * n + column, mask=inside, other=0).to(tl.int64)
        k = tl.load(K + at[:, None] * D + width[None, :], mask=inside[:, None] & (width < D)[None, :], other=0.0)
        v = tl.load(
            V + at[:, None] * DV + value_width[None, :], mask=inside[:, None] & (value_width < DV)[None, :], other=0.0
        )
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(inside[None, :], s, -float("inf"))
        biggest, total, acc = _more(q, k, v, s, biggest, total, acc)

    k_base, v_base = TAIL_K + row * k_row + kv_head * k_head, TAIL_V + row * v_row + kv_head * v_head
    for start in range(0, reach, BN):
        column = start + tl.arange(0, BN)
        inside = column < reach
        k = tl.load(
            k_base + column[:, None] * k_token + width[None, :], mask=inside[:, None] & (width < D)[None, :], other=0.0
        )
        v = tl.load(
            v_base + column[:, None] * v_token + value_width[None, :],
            mask=inside[:, None] & (value_width < DV)[None, :],
            other=0.0,
        )
        seen = tl.load(
            SEEN + (row * t + token[:, None]) * reach + column[None, :], mask=real[:, None] & inside[None, :], other=0
        )
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(seen != 0, s, -float("inf"))
        biggest, total, acc = _more(q, k, v, s, biggest, total, acc)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = ((row * kv_heads * GROUP + head[:, None]) * t + token[:, None]) * DV + value_width[None, :]
    tl.store(OUT + place, acc, mask=real[:, None] & (value_width < DV)[None, :])
