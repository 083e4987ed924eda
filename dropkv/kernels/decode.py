"""Attention of new tokens over a ragged compressed prefix and a dense tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from formats import LayerEntries

ROWS = 1 << 22  # logits of one head at a time are at most so many


def attend_prefix_and_tail(
    q: Tensor,
    prefix: LayerEntries,
    bounds: Sequence[int],
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None,
    reach: int | None,
    n: int,
) -> Tensor:
    """Attention outputs [heads, t, d_v] for q [heads, t, d] of the last t tail tokens.

    prefix: keys [entries, d], values [entries, d_v] of all KV heads end to end, head g at bounds[g] : bounds[g + 1]. keys, values
    [kv_heads, T, d] the tail so far, token i at position n + i. `reach`: sliding layers see only so many positions back.
    One softmax over both parts, in float32 (float64 for float64 queries); no padding, no copy of the prefix.
    """
    heads, t, _ = q.shape
    kv_heads, total, d_v = values.shape
    group = heads // kv_heads
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((kv_heads, group, t, d_v))
    future = _future(t, total, reach, q.device)
    for head in range(kv_heads):
        part = slice(bounds[head], bounds[head + 1])
        rows = q.view(kv_heads, group, t, -1)[head].to(dtype)
        prefix_keys, prefix_values = prefix.keys[part].to(dtype), prefix.values[part].to(dtype)
        length = prefix_keys.shape[0]
        step = max(1, ROWS // max(1, group * (length + total)))
        for start in range(0, t, step):
            block = rows[:, start : start + step].reshape(-1, rows.shape[-1])
            count = block.shape[0] // group
            logits = block.new_empty((block.shape[0], length + total))
            torch.matmul(block, prefix_keys.T, out=logits[:, :length])
            torch.matmul(block, keys[head].to(dtype).T, out=logits[:, length:])
            logits *= scale
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            view = logits.view(group, count, length + total)
            if future is not None:
                view[:, :, length:].masked_fill_(future[start : start + count], -torch.inf)
            if reach is not None:
                own = n + total - t + torch.arange(start, start + count, device=q.device)
                view[:, :, :length].masked_fill_(
                    (own.unsqueeze(1) - prefix.positions[part].unsqueeze(0)) >= reach, -torch.inf
                )
            weights = torch.softmax(logits, dim=-1)
            result = weights[:, :length] @ prefix_values
            result += weights[:, length:] @ values[head].to(dtype)
            out[head, :, start : start + count] = result.view(group, count, d_v).to(q.dtype)
    return out.view(heads, t, d_v)


def _future(t: int, total: int, reach: int | None, device: torch.device) -> Tensor | None:
    """Which tail tokens a new token may not see, bool [t, total]: later ones, and on sliding layers those too far back."""
    if t == 1 and reach is None:
        return None
    row = torch.arange(total - t, total, device=device).unsqueeze(1)
    column = torch.arange(total, device=device).unsqueeze(0)
    hidden = column > row
    return hidden if reach is None else hidden | (row - column >= reach)
