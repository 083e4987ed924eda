"""The kept entries of one layer as tensors, and their bytes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.grids import SCALE_FIELDS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from formats.layout import TensorInfo

INDEX_FIELDS = ("offsets", "positions", "admit", "scores")
ENTRY_FIELDS = ("keys", "values")
STORED_FIELDS = (*SCALE_FIELDS, *ENTRY_FIELDS)  # where the bytes are
LARGE = 2 << 20  # bytes of a large page, and the least for which any are asked for


@dataclass(frozen=True, eq=False)
class LayerEntries:
    """The entries of all KV heads of a layer, end to end: those of head h are offsets[h] to offsets[h+1].

    Of quantised entries keys and values are the codes, [entries, stored width], and four more tensors bfloat16 are the
    grids: key_scales and key_zeros [groups, d_k], value_scales and value_zeros [entries, groups of channels]; kinds
    without zeros have none. formats/quantized.py makes and restores them.

    keys [entries, d_k] and values [entries, d_v] in the stored dtype, keys as the model rotated them;
    offsets int32 [kv_heads+1]; positions int32 [entries], token positions in the document; admit int32 [entries],
    the smallest budget whose kept set holds the entry, ascending inside a head; scores float32 [entries].
    """

    keys: Tensor
    values: Tensor
    offsets: Tensor
    positions: Tensor
    admit: Tensor
    scores: Tensor
    key_scales: Tensor | None = None
    key_zeros: Tensor | None = None
    value_scales: Tensor | None = None
    value_zeros: Tensor | None = None


@dataclass(frozen=True, eq=False)
class IndexPart:
    """What a file says about its entries without the entries: per layer, the tensors of INDEX_FIELDS by name."""

    layers: tuple[dict[str, Tensor], ...]
    tokens: Tensor | None


def torch_dtype(name: str) -> torch.dtype:
    """The dtype named as in the metadata ("bfloat16", ...)."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def allocate(info: TensorInfo) -> Tensor:
    """Uninitialised host memory for one tensor of a file, as `fresh` gives it."""
    return fresh(info.shape, torch_dtype(info.dtype))


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Uninitialised memory, on the host unless a device is given. Raises RuntimeError when there is not enough.

    The system is asked for large pages of host memory: being given it page by page takes longer than reading a file into it.
    """
    import torch

    size = math.prod(shape) * dtype.itemsize
    if (device is not None and device.type != "cpu") or size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"no memory for {size} bytes") from error
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy; writing to them changes the tensor."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
