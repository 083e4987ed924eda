"""Two float32 keys as one integer that sorts as they do, so that one sort does the work of two."""

from __future__ import annotations

import torch
from torch import Tensor

TOP = torch.iinfo(torch.int64).max  # above every pair of numbers


def paired(first: Tensor, second: Tensor) -> Tensor:
    """int64 keys of the inputs' shape that rise with `first`, and with `second` where that is equal. -0 is 0, as in any comparison."""
    bits = (torch.stack([second, first], -1).float() + 0.0).view(torch.int32)  # the low word first
    bits ^= (bits >> 31) & 0x7FFFFFFF  # the bits of negative numbers fall
    bits[..., 0] ^= -(1 << 31)  # a low word has no sign
    return bits.view(torch.int64).squeeze(-1)
