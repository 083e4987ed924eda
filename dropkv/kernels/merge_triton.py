"""One pass over two attention outputs; the plain-torch twin is in `dropkv.kernels.merge`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8  # of one program


def merge_rows(out: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> Tensor:
    """As `merge.merge`; the last dimensions must be dense."""
    heads, s, d = out.shape
    both = torch.empty((heads, s), dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]  # where Triton launches
        _merge[(triton.cdiv(s, ROWS), heads)](
            out, log_sum, other, other_log_sum, both, s, out.stride(0), out.stride(1), other.stride(0), other.stride(1),
            log_sum.stride(0), log_sum.stride(1), other_log_sum.stride(0), other_log_sum.stride(1),
            D=d, BD=triton.next_power_of_2(d), ROWS=ROWS,
        )  # fmt: skip
    return both


@triton.jit
def _merge(
    OUT, SUM, OTHER, OTHER_SUM, BOTH, s, out_head, out_row, other_head, other_row, sum_head, sum_row, other_sum_head, other_sum_row,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    width = tl.arange(0, BD)
    inside = row < s
    log_sum = tl.load(SUM + head * sum_head + row * sum_row, mask=inside, other=0.0)
    other_log_sum = tl.load(OTHER_SUM + head * other_sum_head + row * other_sum_row, mask=inside, other=0.0)
    share = tl.sigmoid(other_log_sum - log_sum)[:, None]
    mask = inside[:, None] & (width < D)[None, :]
    place = OUT + head * out_head + row[:, None].to(tl.int64) * out_row + width[None, :]
    other_place = OTHER + head * other_head + row[:, None].to(tl.int64) * other_row + width[None, :]
    out = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (out + share * (other - out)).to(OUT.dtype.element_ty), mask=mask)
    least = tl.minimum(log_sum, other_log_sum)
    both = tl.maximum(log_sum, other_log_sum) + tl.log(1.0 + tl.exp(least - tl.maximum(log_sum, other_log_sum)))
    tl.store(BOTH + head * s + row, both, mask=inside)
