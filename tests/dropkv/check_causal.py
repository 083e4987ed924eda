"""Attention of slices on a GPU against float64: python tests/dropkv/check_causal.py"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.kernels.causal import attend_behind, causal_attention, cudnn_serves, flash


def definition(q, k, v, scale, reach):
    group = len(q) // len(k)
    q, k, v = q.double(), k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    s, n = q.shape[1], k.shape[1]
    back = torch.arange(n - s, n, device=q.device)[:, None] - torch.arange(n, device=q.device)
    seen = (back >= 0) & (back < (reach or n))
    return torch.softmax((q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf), -1) @ v


def main() -> None:
    for dtype, d, heads, kv_heads in (
        (torch.bfloat16, 128, 8, 2),
        (torch.float16, 64, 7, 1),
        (torch.bfloat16, 80, 4, 4),
        (torch.bfloat16, 256, 4, 2),
        (torch.float32, 64, 4, 2),
    ):
        served = dtype != torch.float32 and cudnn_serves(0, dtype, d)
        for s, n, reach in (
            (700, 700, None),
            (512, 9000, None),
            (1500, 1500 + 3 * 8192, None),
            (700, 3000, 300),
            (100, 200, 900),
        ):
            q, k, v = (
                torch.randn(count, tokens, d, device="cuda").to(dtype)
                for count, tokens in ((heads, s), (kv_heads, n), (kv_heads, n))
            )
            q = q.transpose(0, 1).contiguous().transpose(0, 1)  # as layers hand it over
            want = definition(q, k, v, d**-0.5, reach)
            got = causal_attention(q, k, v, scale=d**-0.5, reach=reach)
            error = float((got.double() - want).norm() / want.norm())
            print(dtype, d, s, n, reach, "cudnn" if served else "", f"{error:.1e}")
            assert got.shape == want.shape and error < (1e-2 if dtype == torch.bfloat16 else 2e-3)
            if dtype != torch.float32:  # as on GPUs before Hopper
                again, log_sum = flash(q, k, v, d**-0.5, causal=True, reach=reach)
                assert float((again.double() - want).norm() / want.norm()) < 1e-2 and log_sum.shape == (heads, s)
            if reach is None and dtype != torch.float32:
                again = attend_behind(q, k[:, : n - s], v[:, : n - s], k[:, n - s :], v[:, n - s :], d**-0.5)
                assert float((again.double() - want).norm() / want.norm()) < 1e-2
    print("all equal")


if __name__ == "__main__":
    main()
