"""One decode step of many masked rows over shared documents, in two Triton kernels; for the accuracy bench.

The first attends all rows of a document and KV head at once to the keys that each row keeps; the second attends every row to its own tail and
puts both together by their log-sum-exps. Logits are never written and nothing is repeated per row. The plain-torch twin is
`dropkv.bench.masked_run.attention_with_sums`, called for both parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


ROWS = 128  # rows of queries that one program takes


def tiles_of(counts: Sequence[int], group: int, device: torch.device, rows: int = ROWS) -> Tensor:
    """For documents with so many rows, which query rows (a row's heads of a KV head's group) each program takes: int32 [tiles, 3], the document,
    the first and the end of its rows."""
    tiles: list[tuple[int, int, int]] = []
    start = 0
    for document, count in enumerate(counts):
        end = start + count * group
        tiles.extend((document, first, end) for first in range(start, end, rows))
        start = end
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3)


def masked_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    seen: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    rows: int = ROWS,
    columns: int = 64,
    warps: int = 4,
) -> Tensor:
    """Attention outputs [rows in all, heads, d_v] of one token per row, q [rows in all, heads, d].

    k, v [documents, kv_heads, n, d] and keep bool [rows in all, kv_heads, n]: what every row keeps of its document; rows of one document
    stand together, and `tiles_of` says which are whose. tail_k, tail_v [rows in all, kv_heads, capacity, d] and seen bool [rows in all,
    reach <= capacity]: which tail tokens a row sees, at least one. q, k and v must be contiguous, the last dimensions of the others
    dense: ValueError otherwise.
    """
    if not all(x.is_contiguous() for x in (q, k, v)) or any(x.stride(-1) != 1 for x in (keep, tail_k, tail_v, seen)):
        raise ValueError(
            "masked_decode takes contiguous queries, keys and values, and masks and tails with a dense last dimension"
        )
    total, heads, d = q.shape
    kv_heads, n, d_v = v.shape[1:]
    group = heads // kv_heads
    far = torch.empty((total, heads, d_v), dtype=torch.float32, device=q.device)
    sums = torch.empty((total, heads), dtype=torch.float32, device=q.device)
    out = torch.empty((total, heads, d_v), dtype=v.dtype, device=q.device)
    sizes = {"D": d, "DV": d_v, "BD": max(16, triton.next_power_of_2(d)), "BDV": max(16, triton.next_power_of_2(d_v))}
    _far[(len(tiles), kv_heads)](
        q, k, v, keep.view(torch.uint8), tiles, far, sums, keep.stride(0), keep.stride(1), n, kv_heads, scale * LOG2E,
        GROUP=group, BM=rows, BN=columns, num_warps=warps, **sizes,
    )  # fmt: skip
    _near[(total, kv_heads)](
        q, tail_k, tail_v, seen.view(torch.uint8), far, sums, out, seen.shape[1], kv_heads, scale * LOG2E,
        tail_k.stride(0), tail_k.stride(1), tail_k.stride(2), tail_v.stride(0), tail_v.stride(1), tail_v.stride(2), seen.stride(0),
        GROUP=group, BG=max(16, triton.next_power_of_2(group)), BN=32, num_warps=2, **sizes,
    )  # fmt: skip
    return out


@triton.jit
def _far(
    Q, K, V, KEEP, TILES, OUT, SUMS, keep_row, keep_head, n, kv_heads, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile, kv_head = TILES + tl.program_id(0) * 3, tl.program_id(1)
    which = tl.load(tile).to(tl.int64) * kv_heads + kv_head  # document and KV head
    line = tl.load(tile + 1) + tl.arange(0, BM)  # row and head of the group
    row = (line // GROUP).to(tl.int64)
    real = line < tl.load(tile + 2)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    place = (row * kv_heads + kv_head) * GROUP + line % GROUP
    q = tl.load(Q + place[:, None] * D + width[None, :], mask=real[:, None] & (width < D)[None, :], other=0.0)
    biggest = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    mask_row = row * keep_row + kv_head * keep_head
    for start in range(0, n, BN):
        column = start + tl.arange(0, BN)
        inside = column < n
        at = which * n + column
        k = tl.load(K + at[None, :] * D + width[:, None], mask=inside[None, :] & (width < D)[:, None], other=0.0)
        kept = tl.load(KEEP + mask_row[:, None] + column[None, :], mask=real[:, None] & inside[None, :], other=0)
        s = tl.dot(q, k, input_precision="ieee") * scale
        s = tl.where(kept != 0, s, -float("inf"))
        new = tl.maximum(biggest, tl.max(s, 1))
        weights = tl.exp2(s - new[:, None])
        turn = tl.exp2(biggest - new)
        total = total * turn + tl.sum(weights, 1)
        v = tl.load(
            V + at[:, None] * DV + value_width[None, :], mask=inside[:, None] & (value_width < DV)[None, :], other=0.0
        )
        acc = tl.dot(weights.to(v.dtype), v, acc * turn[:, None], input_precision="ieee")
        biggest = new
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(OUT + place[:, None] * DV + value_width[None, :], acc, mask=real[:, None] & (value_width < DV)[None, :])
    tl.store(SUMS + place, tl.where(some, biggest + tl.log2(tl.where(some, total, 1.0)), -float("inf")), mask=real)


@triton.jit
def _near(
    Q, K, V, SEEN, FAR, SUMS, OUT, reach, kv_heads, scale,
    k_row, k_head, k_token, v_row, v_head, v_token, seen_row,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.arange(0, BG)
    real = head < GROUP
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    place = (row * kv_heads + kv_head) * GROUP + head
    q = tl.load(Q + place[:, None] * D + width[None, :], mask=real[:, None] & (width < D)[None, :], other=0.0)
    dense = real[:, None] & (value_width < DV)[None, :]
    # what was found in the document is where the tail goes on
    biggest = tl.load(SUMS + place, mask=real, other=0.0)
    some = biggest > -float("inf")
    total = tl.where(some, 1.0, 0.0)
    biggest = tl.where(some, biggest, -1e30)
    acc = tl.load(FAR + place[:, None] * DV + value_width[None, :], mask=dense, other=0.0)
    for start in range(0, reach, BN):
        column = start + tl.arange(0, BN)
        inside = column < reach
        seen = tl.load(SEEN + row * seen_row + column, mask=inside, other=0)
        k = tl.load(
            K + row * k_row + kv_head * k_head + column[None, :] * k_token + width[:, None],
            mask=inside[None, :] & (width < D)[:, None], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, k, input_precision="ieee") * scale
        s = tl.where((seen != 0)[None, :], s, -float("inf"))
        new = tl.maximum(biggest, tl.max(s, 1))
        weights = tl.exp2(s - new[:, None])
        turn = tl.exp2(biggest - new)
        total = total * turn + tl.sum(weights, 1)
        v = tl.load(
            V + row * v_row + kv_head * v_head + column[:, None] * v_token + value_width[None, :],
            mask=inside[:, None] & (value_width < DV)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(weights.to(v.dtype), v, acc * turn[:, None], input_precision="ieee")
        biggest = new
    tl.store(OUT + place[:, None] * DV + value_width[None, :], acc / total[:, None], mask=dense)
