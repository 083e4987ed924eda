"""Attention of a probe's tokens, and their scores of the keys they observe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from dropkv.kernels.dispatch import attention_on_gpu
from dropkv.kernels.score import Attended, Observed, Window

Scores = TypeVar("Scores")


def probe_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    columns: int,
    score: Callable[[Observed], Scores] | None,
    softcap: float | None = None,
    positions: Tensor | None = None,
    reach: int | None = None,
    observing: int | None = None,
    roots: Tensor | None = None,
    told: Tensor | None = None,
) -> tuple[Tensor, Scores | None]:
    """Attention outputs [heads, m, d_v] of a probe, and score(queries) of the first `columns` keys.

    q [heads, m, d]; k [kv_heads, n, d], v [kv_heads, n, d_v], the probe's own keys last. softcap, positions, reach and roots as in
    `Window`. observing: only so many of the last queries observe. told [kv_heads, m]: what each query weighs, for scores that ask.
    On a GPU a kernel gives outputs and log-sum-exps where it can, on a CPU PyTorch's fused attention; elsewhere the exact window does both.
    """
    heads, m, _ = q.shape
    kv_heads = k.shape[0]
    grouped = q.view(kv_heads, heads // kv_heads, m, -1)
    last = slice(0 if observing is None else max(0, m - observing), m)
    own_told = None if told is None else told[:, last]
    whole = Window(grouped, k, v, scale, softcap, columns, positions, reach, roots=roots, told=told)
    attention = attention_on_gpu(whole)
    if attention is not None and attention.outputs is not None:
        window = replace(whole, q=grouped[:, :, last], attention=attention.part(last), told=own_told)
        return attention.outputs.reshape(heads, m, -1).to(q.dtype), None if score is None else score(window)
    fused = None
    if softcap is None and reach is None and q.device.type == "cpu" and k.shape[-1] == v.shape[-1]:
        fused = _fused_on_cpu(q, k, v, scale)
    if fused is not None:
        outputs, log_sum_exp = (part.view(kv_heads, heads // kv_heads, m, *part.shape[2:]) for part in fused)
        own = (grouped[:, :, last], k[:, :columns], v[:, :columns], scale, outputs[:, :, last], log_sum_exp[:, :, last])
        seen: Observed = Attended(*own, roots, own_told)
        return outputs.reshape(heads, m, -1).to(q.dtype), None if score is None else score(seen)
    outputs = q.new_empty(
        (kv_heads, heads // kv_heads, m, v.shape[-1]), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    window = replace(whole, outputs=outputs)
    if score is None:
        return window.attend().reshape(heads, m, -1).to(q.dtype), None
    if observing is not None and observing < m:
        outputs = window.attend()
        window = replace(window, q=grouped[:, :, m - observing :], outputs=None, told=own_told)
    scores = score(window)
    return outputs.reshape(heads, m, -1).to(q.dtype), scores


def _fused_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Outputs [heads, m, d_v] and log-sum-exps [heads, m]; None where this PyTorch has no such operator."""
    operator = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if operator is None:
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q[None].to(wide), k[None].to(wide), v[None].to(wide)
    document = k.shape[2] - q.shape[2]
    # Two calls, since what lies in a probe's own future is then skipped instead of masked.
    near, near_sum = operator(q, k[:, :, document:], v[:, :, document:], 0.0, True, scale=scale)
    if document == 0:  # the operator divides by the number of keys
        return near[0], near_sum[0]
    far, far_sum = operator(q, k[:, :, :document], v[:, :, :document], 0.0, False, scale=scale)
    log_sum_exp = torch.logaddexp(near_sum, far_sum)
    near.mul_((near_sum - log_sum_exp).exp_().unsqueeze(-1))
    far.mul_((far_sum - log_sum_exp).exp_().unsqueeze(-1))
    return near.add_(far)[0], log_sum_exp[0]
