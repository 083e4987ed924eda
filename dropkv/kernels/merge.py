"""Attention over two sets of keys made one, from the outputs and log-sum-exps over each."""

from __future__ import annotations

import torch
from torch import Tensor

from dropkv.kernels.triton_here import triton_works


def merge(out: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> Tensor:
    """Make `out` [heads, s, d], in place, what it would be over the keys of both; gives their log-sum-exps, float32 [heads, s] as given.

    Weights are float32, so nothing is lost but the rounding of the two outputs.
    """
    if triton_works(out.device):
        from dropkv.kernels.merge_triton import merge_rows

        return merge_rows(out, log_sum, other, other_log_sum)
    share = torch.sigmoid(other_log_sum - log_sum).unsqueeze(-1)
    out.copy_(torch.lerp(out.to(share.dtype), other.to(share.dtype), share))
    return torch.logaddexp(log_sum, other_log_sum)
