"""The chosen entries of a layer copied out of K and V in file order (Triton). The plain-torch twin is `dropkv.keeper.take`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropkv.budgets import Kept
from formats import LayerEntries


def gather_entries(k: Tensor, v: Tensor, chosen: Kept, scores: Tensor) -> LayerEntries:
    """The chosen entries of k [kv_heads, n, d_k] and v [kv_heads, n, d_v], whose last dimension is dense, with their scores float32."""
    heads, _, d = k.shape
    d_v, total = v.shape[-1], len(chosen.positions)
    scores = scores.contiguous()
    entries = LayerEntries(
        keys=k.new_empty((total, d)),
        values=v.new_empty((total, d_v)),
        offsets=torch.empty(heads + 1, dtype=torch.int32, device=k.device),
        positions=torch.empty(total, dtype=torch.int32, device=k.device),
        admit=torch.empty(total, dtype=torch.int32, device=k.device),
        scores=torch.empty(total, dtype=torch.float32, device=k.device),
    )
    rows = 16
    _gather[(triton.cdiv(total, rows),)](
        k, v, scores, chosen.positions, chosen.admit, chosen.counts, entries.offsets, entries.keys, entries.values, entries.positions,
        entries.admit, entries.scores, k.stride(0), k.stride(1), v.stride(0), v.stride(1), scores.shape[1], heads, total,
        ROWS=rows, D=d, DV=d_v, BD=triton.next_power_of_2(d), BDV=triton.next_power_of_2(d_v), HP=triton.next_power_of_2(heads),
        num_warps=4,
    )  # fmt: skip
    return entries


@triton.jit(do_not_specialize=["n", "heads", "total"])
def _gather(
    K, V, SCORES, POSITIONS, ADMIT, COUNTS, OFFSETS, KEYS, VALUES, OUT_POSITIONS, OUT_ADMIT, OUT_SCORES,
    k_head, k_key, v_head, v_key, n, heads, total,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = line < total
    head = tl.arange(0, HP)
    end = tl.cumsum(tl.load(COUNTS + head, mask=head < heads, other=0).to(tl.int32), 0)
    if tl.program_id(0) == 0:
        tl.store(OFFSETS, 0)
        tl.store(OFFSETS + head + 1, end, mask=head < heads)
    own = tl.sum(((end[None, :] <= line[:, None]) & (head < heads)[None, :]).to(tl.int32), 1).to(tl.int64)
    position = tl.load(POSITIONS + line, mask=inside, other=0)
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    row = line.to(tl.int64)[:, None]
    mask = inside[:, None] & (width < D)[None, :]
    k = tl.load(K + (own * k_head + position * k_key)[:, None] + width[None, :], mask=mask, other=0.0)
    value_mask = inside[:, None] & (value_width < DV)[None, :]
    v = tl.load(V + (own * v_head + position * v_key)[:, None] + value_width[None, :], mask=value_mask, other=0.0)
    tl.store(KEYS + row * D + width[None, :], k, mask=mask)
    tl.store(VALUES + row * DV + value_width[None, :], v, mask=value_mask)
    tl.store(OUT_POSITIONS + line, position.to(tl.int32), mask=inside)
    tl.store(OUT_ADMIT + line, tl.load(ADMIT + line, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(OUT_SCORES + line, tl.load(SCORES + own * n + position, mask=inside, other=0.0), mask=inside)
