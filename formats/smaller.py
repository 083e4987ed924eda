"""A smaller budget of a file: which rows of its tensors it keeps, and what its index and metadata become.

The entries of a head stand in ascending admit, so those of a smaller budget are the head's first rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from formats.entries import INDEX_FIELDS, IndexPart
from formats.grids import GROUP_FIELDS
from formats.layout import TensorInfo
from formats.metadata import BudgetInfo, LayerInfo, Metadata
from formats.partial import Part
from formats.quantized import group_rows

if TYPE_CHECKING:
    from torch import Tensor

Rows = tuple[tuple[int, int], ...]

# Decides about a smaller budget once the metadata is known; raises what its caller wants to see.
Choose = Callable[[Metadata], BudgetInfo]


@dataclass(frozen=True, eq=False)
class Smaller:
    """What a smaller budget keeps: its metadata, its index, and for each layer the rows [start, stop) of every KV head in the file.

    groups: the same for the grids of quantised keys, whose rows are groups of entries; a head's last group may be kept for
    the first of its entries only.
    """

    metadata: Metadata
    index: IndexPart
    rows: tuple[Rows, ...]
    groups: tuple[Rows, ...]

    def parts(self, info: TensorInfo) -> list[Part]:
        """Where what is kept lies in a tensor of the file that has a row for each entry, or group: one part for every head."""
        rows = (self.groups if info.field in GROUP_FIELDS else self.rows)[info.layer]
        width = info.size // info.shape[0] if info.shape[0] else 0
        return [Part(info, start * width, stop * width) for start, stop in rows]


def cut(metadata: Metadata, index: IndexPart, budget: BudgetInfo) -> Smaller:
    """The entries with admit <= budget.kept, and every entry of sliding layers.

    budget: that of the smaller file; its kept is at most the file's own and equal to it unless the file's sets are nested.
    `fidelity` was measured with the entries of the file: it stays only when all of them do.
    """
    own = metadata.budget
    whole = budget.kept == own.kept
    assert whole or (own.nested and budget.kept < own.kept)
    rows = tuple(
        _rows(layer, part, budget.kept, whole=whole) for layer, part in zip(metadata.layers, index.layers, strict=True)
    )
    layers = tuple(
        replace(layer, entries=sum(stop - start for start, stop in heads))
        for layer, heads in zip(metadata.layers, rows, strict=True)
    )
    quantization, groups = metadata.quantization, tuple[Rows, ...]()
    if quantization is not None:
        pairs = zip(index.layers, rows, strict=True)
        groups = tuple(_groups(part["offsets"].tolist(), heads, quantization.key_group) for part, heads in pairs)
        counts = tuple(sum(stop - start for start, stop in heads) for heads in groups)
        quantization = replace(quantization, key_groups=counts)
    smaller = replace(
        metadata,
        budget=budget,
        layers=layers,
        fidelity=metadata.fidelity if whole else None,
        quantization=quantization,
    )
    parts = tuple(_cut_index(part, heads) for part, heads in zip(index.layers, rows, strict=True))
    return Smaller(smaller, IndexPart(parts, index.tokens), rows, groups)


def _rows(layer: LayerInfo, part: Mapping[str, Tensor], kept: int, *, whole: bool) -> Rows:
    offsets: list[int] = part["offsets"].tolist()
    admit = part["admit"].numpy()
    heads = pairwise(offsets)
    if whole or layer.kind == "sliding":
        return tuple(heads)
    return tuple((start, start + int(admit[start:stop].searchsorted(kept, side="right"))) for start, stop in heads)


def _groups(offsets: list[int], rows: Rows, group: int) -> Rows:
    """Rows of the grids of keys: they start anew at every head, so that a head's first entries have its first groups."""
    whole = group_rows(offsets, group)
    return tuple((at, at - (start - stop) // group) for (at, _), (start, stop) in zip(whole, rows, strict=True))


def _cut_index(part: Mapping[str, Tensor], heads: Rows) -> dict[str, Tensor]:
    import torch

    counts = torch.tensor([0, *(stop - start for start, stop in heads)])
    smaller = {"offsets": counts.cumsum(0).int()}
    for field in INDEX_FIELDS[1:]:
        smaller[field] = torch.cat([part[field][start:stop] for start, stop in heads])
    return smaller
