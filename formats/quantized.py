"""Entries as codes on grids, and back.

A grid has a scale s and, in kinds with zeros, a zero z, both bfloat16. With x the entries it spans, in float32, low their
least and high their greatest, and `top` the largest code:

    with zeros:  z = low rounded down, s = (high - z) / top rounded up, code = round((x - z) / s) from 0 to top
    without:     s = max(high, -low) / top rounded up, code = x / s rounded to the nearest number of float8_e4m3fn
    restored:    z + s * code, in float32, then rounded once to the type that is computed in

so that a grid covers what it spans, and no code is further than half a step from its entry. Grids of keys span entries of
one KV head in one channel, since a few channels of keys are much larger than the rest throughout a document; grids of values
span channels of one entry (both found by KIVI, Liu et al., ICML 2024, arXiv:2402.02750). They begin anew at every head, so a
head's first entries restore to the same numbers whatever follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from formats.entries import LayerEntries, fresh
from formats.errors import WriteFailed
from formats.grids import KINDS, LARGEST_ENTRY, Kind
from formats.metadata import Quantization

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TINY = 2.0**-126  # the smallest scale but zero
CHUNK = (
    1 << 15
) - 1  # numbers that a CPU thread restores at once: few enough for its cache, and for torch not to split them further
GPU_CHUNK = 1 << 26  # and a GPU, to bound the float32 copies


def describe(kind: str, bounds: Iterable[Sequence[int]]) -> Quantization:
    """The description of entries of this kind in the group sizes a writer chooses; bounds: the offsets of each layer."""
    chosen = KINDS[kind]
    counts = tuple(count_groups(offsets, chosen.key_group) for offsets in bounds)
    return Quantization(kind, chosen.key_group, chosen.value_group, counts)


def count_groups(offsets: Sequence[int], group: int) -> int:
    """Groups of `group` entries of all heads of a layer; the last of each head may be shorter."""
    return sum(-(-(stop - start) // group) for start, stop in pairwise(offsets))


def entry_bytes(kind: str, d_k: int, d_v: int) -> float:
    """Bytes of an entry's codes and its share of the grids, where heads have many entries."""
    chosen = KINDS[kind]
    numbers = 4 if chosen.zeros else 2
    grids = numbers * (d_k / chosen.key_group + -(-d_v // chosen.value_group))
    return chosen.width(d_k) + chosen.width(d_v) + grids


def group_rows(offsets: Sequence[int], group: int) -> list[tuple[int, int]]:
    """For each head, the rows [start, stop) of key_scales and key_zeros that belong to it."""
    rows, at = [], 0
    for start, stop in pairwise(offsets):
        rows.append((at, at + -(-(stop - start) // group)))
        at = rows[-1][1]
    return rows


def quantize(layer: LayerEntries, quantization: Quantization) -> LayerEntries:
    """The layer with codes and grids in place of keys and values, on the same device.

    Raises WriteFailed for entries that are not finite, or of a magnitude above 2**120.
    """
    import torch

    kind = KINDS[quantization.kind]
    spans = _Spans(layer.offsets, quantization.key_group)
    keys, values = layer.keys.float(), layer.values.float()
    low, high = spans.extremes(keys)
    key_grid = _grid(low, high, kind)
    codes = _pack(_codes(keys, spans.expand(key_grid[0]), spans.expand(key_grid[1]), kind), kind)
    group = quantization.value_group
    parts = [values[:, start : start + group] for start in range(0, values.shape[1], group)]
    value_grid = _grid(
        torch.stack([part.amin(dim=1) for part in parts], dim=1),
        torch.stack([part.amax(dim=1) for part in parts], dim=1),
        kind,
    )
    width = values.shape[1]
    wide = [_widen(part, group, width) for part in value_grid]
    value_codes = _pack(_codes(values, wide[0], wide[1], kind), kind)
    return replace(
        layer,
        keys=codes,
        values=value_codes,
        key_scales=key_grid[0],
        key_zeros=key_grid[1],
        value_scales=value_grid[0],
        value_zeros=value_grid[1],
    )


def restore_all(
    layers: Sequence[LayerEntries],
    quantization: Quantization,
    shapes: Sequence[tuple[int, int]],
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> list[LayerEntries]:
    """`restore` of every layer; shapes: its d_k and d_v. On a CPU layers go side by side, since each is many small steps."""
    import torch

    def one(layer: LayerEntries, shape: tuple[int, int], device: torch.device) -> LayerEntries:
        return restore(layer, quantization, *shape, device, dtype)

    if any(device.type != "cpu" for device in devices):
        return [one(*each) for each in zip(layers, shapes, devices, strict=True)]
    with ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="dropkv-restore") as pool:
        return list(pool.map(one, layers, shapes, devices))


def restore(
    layer: LayerEntries, quantization: Quantization, d_k: int, d_v: int, device: torch.device, dtype: torch.dtype
) -> LayerEntries:
    """The layer with keys [entries, d_k] and values [entries, d_v] in `dtype` on a device, which does the arithmetic.

    The restored numbers are the same bits on every device.
    """
    kind = KINDS[quantization.kind]
    offsets = layer.offsets.to(device)
    spans = _Spans(offsets, quantization.key_group)
    keys = _restored(
        layer.keys.to(device), kind, d_k, 1, dtype, _moved((layer.key_scales, layer.key_zeros), device), spans.of_entry
    )
    values = _restored(
        layer.values.to(device),
        kind,
        d_v,
        quantization.value_group,
        dtype,
        _moved((layer.value_scales, layer.value_zeros), device),
        None,
    )
    return LayerEntries(keys, values, offsets, layer.positions.to(device), layer.admit, layer.scores)


class _Spans:
    """Which group each entry of a layer's keys belongs to. offsets: int32 [kv_heads+1]."""

    def __init__(self, offsets: Tensor, group: int) -> None:
        import torch

        bounds = offsets.long()
        counts = (bounds.diff() + group - 1) // group
        heads = torch.arange(len(counts), device=bounds.device).repeat_interleave(counts)
        within = torch.arange(len(heads), device=bounds.device) - (counts.cumsum(0) - counts)[heads]
        self.group = group
        self.starts = bounds[heads] + within * group
        self.stops = torch.minimum(self.starts + group, bounds[heads + 1])
        self.of_entry = torch.arange(len(heads), device=bounds.device).repeat_interleave(self.stops - self.starts)

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest of each group in each channel of x [entries, d]: two of [groups, d]."""
        import torch

        line = torch.arange(self.group, device=x.device)
        rows = torch.minimum(
            self.starts[:, None] + line, self.stops[:, None] - 1
        )  # a short group repeats its last entry
        if not len(rows):
            return x.new_empty((0, x.shape[1])), x.new_empty((0, x.shape[1]))
        low, high = x[rows].aminmax(dim=1)
        return low, high

    def expand(self, part: Tensor | None, start: int = 0, stop: int | None = None) -> Tensor | None:
        """The row of `part` [groups, d] for each of the entries from start to stop."""
        return None if part is None else part.index_select(0, self.of_entry[start:stop])


def _grid(low: Tensor, high: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """Scale and zero in bfloat16 of grids that cover low to high, float32."""
    import torch

    if not bool(((low >= -LARGEST_ENTRY) & (high <= LARGEST_ENTRY)).all()):  # no number is neither
        raise WriteFailed(
            "keys or values that are not finite, or above 2**120, cannot be quantised", fix="use --kv-dtype same"
        )
    zero = _toward_minus(low) if kind.zeros else None
    reach = torch.maximum(high, -low) if zero is None else high - zero
    scale = _away_from_zero(reach / kind.top)
    scale = torch.where(reach > 0, scale.clamp_min(TINY), 0.0)
    return scale.bfloat16(), None if zero is None else zero.bfloat16()


def _away_from_zero(x: Tensor) -> Tensor:
    """The nearest bfloat16 numbers that are not nearer to zero, still as float32."""
    import torch

    return ((x.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _toward_minus(x: Tensor) -> Tensor:
    """The greatest bfloat16 numbers that are not above x, still as float32."""
    import torch

    cut = (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)
    return torch.where(x < 0, _away_from_zero(x), cut) + 0.0  # adding turns -0 into 0


def _codes(x: Tensor, scale: Tensor | None, zero: Tensor | None, kind: Kind) -> Tensor:
    import torch

    assert scale is not None
    step = scale.float()
    step = torch.where(step == 0, 1.0, step)
    if zero is None:
        return (x / step).clamp(-kind.top, kind.top).to(getattr(torch, kind.codes))
    return ((x - zero.float()) / step).round_().clamp_(0, kind.top).to(torch.uint8)


def _pack(codes: Tensor, kind: Kind) -> Tensor:
    """Two codes of four bits in a byte: channel j in its low half, channel j + ceil(d / 2) in its high half."""
    if not kind.packed:
        return codes
    half = kind.width(codes.shape[1])
    packed = codes[:, :half].contiguous()
    packed[:, : codes.shape[1] - half] |= codes[:, half:] << 4
    return packed


def _restored(
    codes: Tensor,
    kind: Kind,
    channels: int,
    group: int,
    dtype: torch.dtype,
    grid: Sequence[Tensor | None],
    rows: Tensor | None,
) -> Tensor:
    """zero + scale * code [entries, channels] in `dtype`.

    grid: scales and zeros, float32: a row for each entry, or rows [entries] says which; a column for each `group` channels.
    """
    import torch

    entries = codes.shape[0]
    out = fresh((entries, channels), dtype, codes.device)
    step = max(1, (CHUNK if codes.device.type == "cpu" else GPU_CHUNK) // channels)
    # Buffers for all steps: memory that is allocated anew costs more than the arithmetic.
    numbers, *wide = (out.new_empty((min(step, entries), channels), dtype=torch.float32) for _ in range(3))
    even = rows is None and channels % group == 0
    most = torch.finfo(dtype).max
    for start in range(0, entries, step):
        stop = min(start + step, entries)
        restored = numbers[: stop - start]
        _unpack(codes[start:stop], kind, restored)
        for part, buffer, apply in zip(grid, wide, (torch.Tensor.mul_, torch.Tensor.add_), strict=True):
            if part is None:
                continue
            if even:
                apply(restored.view(stop - start, -1, group), part[start:stop, :, None])
            elif rows is None:
                apply(restored, part[start:stop].repeat_interleave(group, dim=1)[:, :channels])
            else:
                apply(restored, torch.index_select(part, 0, rows[start:stop], out=buffer[: stop - start]))
        if most < 2.0**127:  # half a step above the largest float16 there is
            restored.clamp_(-most, most)
        out[start:stop] = restored
    return out


def _unpack(codes: Tensor, kind: Kind, out: Tensor) -> None:
    """Write codes as numbers to `out` [entries, channels], float32."""
    import torch

    if kind.packed:
        half = codes.shape[1]
        out[:, :half] = codes & 15
        out[:, half:] = (codes >> 4)[:, : out.shape[1] - half]
    elif kind.zeros or codes.device.type != "cpu":
        out.copy_(codes)
    else:
        # torch's own conversion is ten times slower on a CPU. Seven bits higher, an e4m3 is a float16 2**-8 times as large.
        halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
        out.copy_(halves.view(torch.float16))
        out *= 256.0


def _widen(part: Tensor | None, group: int, channels: int) -> Tensor | None:
    """Each column of `part` for the `group` channels it spans."""
    return None if part is None else part.repeat_interleave(group, dim=1)[:, :channels]


def _moved(parts: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    return [None if part is None else part.to(device).float() for part in parts]
