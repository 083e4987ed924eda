"""Two float32 keys as one integer that sorts as they do, so that one sort does the work of two."""

from __future__ import annotations

import torch
from torch import Tensor

TOP = torch.iinfo(torch.int64).max  # above every pair


def paired(first: Tensor, second: Tensor) -> Tensor:
    """int64 keys of the inputs' shape that rise with `first`, and with `second` where that is equal. -0 is 0, as in any comparison."""
    return (_rising(first).long() << 32) + (_rising(second).long() + (1 << 31))


def _rising(x: Tensor) -> Tensor:
    """The bits of float32 numbers as int32 that rise with them: those of negative numbers fall."""
    bits = (x.float() + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
