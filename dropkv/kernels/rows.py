"""Attention of many rows over shared ragged prefixes and over each row's own tail, in plain torch.

Both parts give outputs and log-sum-exps, by which they are put together: softmax over the union is
sum_i exp(s_i - s) o_i with s the log-sum-exp of the s_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from formats import LayerEntries

LOGITS = 1 << 22  # logits of one head at a time are at most so many


def over_prefix(
    q: Tensor,
    own: Tensor,
    prefix: LayerEntries,
    bounds: Sequence[int],
    *,
    scale: float,
    softcap: float | None,
    reach: int | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [heads, t, d_v] and log-sum-exps [heads, t], float32 or wider, of q [heads, t, d] over a prefix whose KV head g has the
    entries bounds[g] : bounds[g + 1].

    own: the queries' positions, int64 [t]; layers with `reach` see only so many positions back. Queries that see no entry get 0 and
    a log-sum-exp of -inf. All rows are one matrix, so the prefix is read once for all of them.
    """
    heads, t, _ = q.shape
    kv_heads = len(bounds) - 1
    group = heads // kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((kv_heads, group, t, prefix.values.shape[-1]), dtype=wide)
    sums = q.new_full((kv_heads, group, t), -torch.inf, dtype=wide)
    for head in range(kv_heads):
        part = slice(bounds[head], bounds[head + 1])
        keys, values = prefix.keys[part].to(wide), prefix.values[part].to(wide)
        if not len(keys):
            continue
        rows = q.view(kv_heads, group, t, -1)[head].to(wide)
        step = max(1, LOGITS // (group * len(keys)))
        for start in range(0, t, step):
            these = slice(start, min(t, start + step))
            block = rows[:, these]
            logits = (block.reshape(-1, block.shape[-1]) @ keys.T).view(group, -1, len(keys))
            _scaled(logits, scale, softcap)
            if reach is not None:
                gone = own[these].unsqueeze(1) - prefix.positions[part].unsqueeze(0) >= reach
                logits.masked_fill_(gone, -torch.inf)
            weights = _weights(logits, sums[head, :, these])
            out[head, :, these] = (weights.view(-1, len(keys)) @ values).view(group, -1, values.shape[-1])
    return out.view(heads, t, -1), sums.view(heads, t)


def over_tails(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None,
    reach: int | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [heads, rows, d_v] and log-sum-exps [heads, rows], float32 or wider, of one query a row, q [heads, rows, d], over that
    row's first lengths[row] tokens of keys [rows, kv_heads, T, d] and values [rows, kv_heads, T, d_v].

    lengths: int64 [rows], at least 1: a row's newest token is the query's own.
    """
    heads, rows, d = q.shape
    kv_heads, total = keys.shape[1], keys.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    mine = q.view(kv_heads, -1, rows, d).permute(2, 0, 1, 3).to(wide)  # [rows, kv_heads, group, d]
    logits = _scaled(mine @ keys.transpose(2, 3).to(wide), scale, softcap)
    line = torch.arange(total, device=q.device)
    unseen = line >= lengths.unsqueeze(1)
    if reach is not None:
        unseen |= lengths.unsqueeze(1) - 1 - line >= reach
    logits.masked_fill_(unseen.view(rows, 1, 1, total), -torch.inf)
    sums = q.new_empty((rows, kv_heads, heads // kv_heads), dtype=wide)
    out = _weights(logits, sums) @ values.to(wide)
    return out.permute(1, 2, 0, 3).reshape(heads, rows, -1), sums.permute(1, 2, 0).reshape(heads, rows)


def over_own(
    q: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None, reach: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs [heads, t, d_v] and log-sum-exps [heads, t], float32 or wider, of the newest t tokens of one row, q [heads, t, d], over keys
    [kv_heads, T, d] and values [kv_heads, T, d_v] of all its tokens, causally."""
    heads, t, _ = q.shape
    kv_heads, total, _ = keys.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, columns = q.view(kv_heads, -1, t, q.shape[-1]).to(wide), keys.to(wide).transpose(1, 2)
    out = q.new_empty((*rows.shape[:3], values.shape[-1]), dtype=wide)
    sums = q.new_empty(rows.shape[:3], dtype=wide)
    line = torch.arange(total, device=q.device)
    step = max(1, LOGITS // (heads * total))
    for start in range(0, t, step):
        these = slice(start, min(t, start + step))
        logits = _scaled(rows[:, :, these].flatten(1, 2) @ columns, scale, softcap).view(*rows.shape[:2], -1, total)
        own = line[total - t :][these].unsqueeze(1)
        unseen = line > own
        if reach is not None:
            unseen |= own - line >= reach
        logits.masked_fill_(unseen, -torch.inf)
        weights = _weights(logits, sums[:, :, these]).flatten(1, 2)
        out[:, :, these] = (weights @ values.to(wide)).view(*rows.shape[:2], -1, values.shape[-1])
    return out.view(heads, t, -1), sums.view(heads, t)


def together(out: Tensor, sums: Tensor, other: Tensor, others: Tensor) -> Tensor:
    """Outputs [..., d_v] over the union of two sets of keys; the log-sum-exps [...] of the second, `others`, must be finite."""
    return other + torch.sigmoid(sums - others).unsqueeze(-1) * (out - other)


def _scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits *= scale
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _weights(logits: Tensor, sums: Tensor) -> Tensor:
    """The logits become weights, in place, and `sums` their log-sum-exps; rows of -inf become 0."""
    sums.copy_(torch.logsumexp(logits, dim=-1))
    base = sums.masked_fill(sums == -torch.inf, 0)
    return logits.sub_(base.unsqueeze(-1)).exp_()
