"""What the numbers in index tensors, codes and grids must satisfy, besides having the right shapes and hashes.

Used before writing, so that no such file comes to be, and after reading, since a hash can be forged. Works on numpy
views of host tensors: torch's operators start a thread team each, which costs more than these checks on a busy machine.
Every function raises CorruptFile naming tensor, head and entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from formats.errors import CorruptFile
from formats.grids import LARGEST_SCALE, LARGEST_ZERO, SCALE_FIELDS, SMALLEST_SCALE

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from torch import Tensor

    from formats.layout import TensorInfo
    from formats.metadata import BudgetInfo, DocumentInfo, LayerInfo, Quantization

    Integers = NDArray[numpy.int32]


def check_tokens(tokens: Tensor) -> None:
    """Token ids [n] int32 are not negative."""
    negative = tokens.numpy() < 0
    if negative.any():
        at = int(negative.argmax())
        raise CorruptFile(f"is {int(tokens[at])}, not a token id", where=f"tokens, element {at}")


def check_layer(
    index: int, layer: LayerInfo, document: DocumentInfo, budget: BudgetInfo, part: Mapping[str, Tensor]
) -> None:
    """The index tensors of one layer: offsets [kv_heads+1], positions, admit and scores [entries]."""
    name = f"layers.{index}"
    offsets = _check_offsets(f"{name}.offsets", part["offsets"], layer.entries)
    if layer.entries == 0:
        return
    positions, admit, scores = (part[field].numpy() for field in ("positions", "admit", "scores"))
    _check_range(f"{name}.positions", positions, offsets, 0, document.tokens - 1)
    # A sliding layer is kept whole and no budget cuts it, so its admit is free up to n; 0 is the plain choice.
    full = layer.kind == "full"
    _check_range(f"{name}.admit", admit, offsets, int(full), budget.kept if full else document.tokens)
    _check_finite(f"{name}.scores", scores, offsets)
    _check_ascending(f"{name}.admit", admit, offsets)
    _check_unique(f"{name}.positions", positions, offsets)


def check_groups(index: int, layer: LayerInfo, quantization: Quantization, offsets: Sequence[int]) -> None:
    """The groups of a layer's keys are those that the entries of its heads make: they start anew at every head."""
    group, found = quantization.key_group, quantization.key_groups[index]
    wanted = sum(-(-(stop - start) // group) for start, stop in pairwise(offsets))
    if found != wanted:
        raise CorruptFile(
            f"is {found}, the {layer.kv_heads} heads have {wanted} groups of {group} entries",
            where=f"quantization.key_groups[{index}]",
        )


def has_codes(info: TensorInfo) -> bool:
    """Whether `check_codes` has anything to check in this tensor."""
    return info.field in SCALE_FIELDS or info.dtype == "float8_e4m3fn" or info.spare


def check_codes(info: TensorInfo, start: int, raw: memoryview) -> None:
    """Codes and grids of quantised entries, from byte `start` of their tensor on; nothing to check in other tensors."""
    import numpy

    field = info.field
    if field in SCALE_FIELDS:
        bits = numpy.frombuffer(raw, "<u2")
        if field.endswith("scales"):
            wrong = (bits > LARGEST_SCALE) | ((bits < SMALLEST_SCALE) & (bits != 0))
            what = "a scale: zero, or from 2**-126 to 2**118"
        else:
            wrong = ((bits & 0x7FFF) > LARGEST_ZERO) | (bits == 0x8000)
            what = "a zero of a grid: a number of magnitude up to 2**121"
        _refuse_code(info, start // 2, wrong, bits, what)
    elif info.dtype == "float8_e4m3fn":
        codes = numpy.frombuffer(raw, numpy.uint8)
        _refuse_code(info, start, (codes & 0x7F) == 0x7F, codes, "a number")
    elif info.spare:
        width = info.shape[1]
        codes = numpy.frombuffer(raw, numpy.uint8)[(width - 1 - start) % width :: width]
        if codes.size and codes.max() > 15:
            row = (start + (width - 1 - start) % width) // width + int((codes > 15).argmax())
            raise CorruptFile("has a code behind its last channel", where=f"{info.name}, entry {row}")


def _refuse_code(info: TensorInfo, first: int, wrong: Any, bits: Any, what: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        row, column = divmod(first + at, info.shape[1])
        raise CorruptFile(
            f"has the bits {bits[at]:#x}, which are not {what}", where=f"{info.name}, row {row}, {column}"
        )


def _check_offsets(where: str, tensor: Tensor, entries: int) -> list[int]:
    offsets: list[int] = tensor.tolist()
    if offsets[0] != 0 or offsets[-1] != entries:
        raise CorruptFile(f"run from {offsets[0]} to {offsets[-1]}, not from 0 to the {entries} entries", where=where)
    for head in range(len(offsets) - 1):
        if offsets[head + 1] < offsets[head]:
            raise CorruptFile(f"fall from {offsets[head]} to {offsets[head + 1]}", where=f"{where}, head {head}")
    return offsets


def _check_range(where: str, values: Integers, offsets: list[int], low: int, high: int) -> None:
    if values.min() < low or values.max() > high:
        at = int(((values < low) | (values > high)).argmax())
        raise CorruptFile(f"is {values[at]}, not in {low} to {high}", where=_place(where, at, offsets))


def _check_finite(where: str, values: NDArray[Any], offsets: list[int]) -> None:
    import numpy

    finite = numpy.isfinite(values)
    if not finite.all():
        at = int(finite.argmin())
        raise CorruptFile(f"is {values[at]}, not a finite number", where=_place(where, at, offsets))


def _check_ascending(where: str, values: Integers, offsets: list[int]) -> None:
    """Equal neighbours are allowed: several entries may enter with the same budget."""
    falls = values[1:] < values[:-1]
    for start in offsets[1:-1]:
        if 0 < start < len(values):
            falls[start - 1] = False
    if falls.any():
        at = int(falls.argmax()) + 1
        reason = f"falls from {values[at - 1]} to {values[at]}; the entries of a head stand in ascending admit"
        raise CorruptFile(reason, where=_place(where, at, offsets))


def _check_unique(where: str, values: Integers, offsets: list[int]) -> None:
    for head in range(len(offsets) - 1):
        ordered = values[offsets[head] : offsets[head + 1]].copy()
        ordered.sort()
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise CorruptFile(f"position {ordered[int(twice.argmax())]} occurs twice", where=f"{where}, head {head}")


def _place(where: str, at: int, offsets: list[int]) -> str:
    head = next(head for head in range(len(offsets) - 1) if offsets[head] <= at < offsets[head + 1])
    return f"{where}, head {head}, entry {at - offsets[head]}"
