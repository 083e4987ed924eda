"""Run by test_fused_replay.py: the kernel that joins two attentions against its twin. python check_merge.py DTYPE [DEVICE]"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())
import torch

from dropkv.kernels.merge import merge
from dropkv.kernels.merge_triton import merge_rows


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    for heads, s, d in ((2, 13, 16), (3, 8, 24), (1, 1, 64)):
        out, other = torch.randn(2, s, heads, d, device=device).to(dtype).transpose(1, 2)  # token after token
        log_sum, other_log_sum = torch.randn(2, heads, s, device=device) * 3
        other_log_sum[0, 0] = -torch.inf
        want = out.double().cpu().clone()
        sums = merge(want, log_sum.cpu(), other.double().cpu(), other_log_sum.cpu())
        got = out.clone()
        found = merge_rows(got, log_sum, other, other_log_sum)
        error = float((got.cpu().double() - want).norm() / want.norm())
        print(heads, s, d, f"{error:.1e}")
        assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
        assert torch.allclose(found.cpu(), sums.float(), atol=1e-5)
    print("all equal")


if __name__ == "__main__":
    main()
