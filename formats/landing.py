"""Entries where they are computed with: each layer on its device, in the type of the computation, quantised ones restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats import layout
from formats.entries import STORED_FIELDS, LayerEntries, fresh, torch_dtype
from formats.errors import UnreadableFile
from formats.header import Header
from formats.layout import TensorInfo
from formats.metadata import Metadata
from formats.partial import Part, read_parts
from formats.quantized import restore_all
from formats.smaller import Smaller
from formats.source import Source
from formats.staging import Buffers, staging

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CODED = 24 << 20  # bytes of codes and grids in memory at a time, unless a single layer has more


@dataclass(frozen=True)
class Landing:
    """Where entries are wanted: the device of each layer, and the type of keys and values.

    offsets and positions come to the device too; admit and scores stay in host memory, where they are looked at.
    """

    devices: tuple[torch.device, ...]
    dtype: torch.dtype


# Says where entries are wanted once the metadata is known; raises what its caller wants to see.
Land = Callable[[Metadata], Landing]


def read_onto(
    source: Source, header: Header, smaller: Smaller, threads: int, landing: Landing, buffers: Buffers | None = None
) -> list[LayerEntries]:
    """The entries of a smaller budget, or of all of the file, from the file to where they are wanted, every block checked on the way.

    Host memory besides the entries that stay there: the buffers, and of quantised entries some layers' codes.
    """
    if buffers is None:
        with staging(threads, landing.devices) as own:
            return read_onto(source, header, smaller, threads, landing, own)
    quantization = smaller.metadata.quantization
    assert len(landing.devices) == len(smaller.metadata.layers)
    layers: list[LayerEntries] = []
    for group in _groups(smaller.metadata):
        infos = [info for one in group for info in one]
        wanted: list[tuple[Part, Tensor]] = []
        numbers: list[dict[str, Tensor]] = []
        for one in group:
            device = landing.devices[one[0].layer]
            fields = {
                info.field: allocated(info, device, landing.dtype if quantization is None else torch_dtype(info.dtype))
                for info in one
            }
            numbers.append(fields)
            for info in one:
                wanted += _split(_joined(smaller.parts(header.tensors[info.name])), fields[info.field])
        read_parts(source, header, wanted, threads, buffers)
        first, last = infos[0].layer, infos[-1].layer + 1
        devices = landing.devices[first:last]
        read = []
        for part, fields, device in zip(smaller.index.layers[first:last], numbers, devices, strict=True):
            moved = {field: part[field].to(device) for field in ("offsets", "positions")}
            read.append(LayerEntries(**fields, **moved, admit=part["admit"], scores=part["scores"]))
        if quantization is not None:
            buffers.wait()
            shapes = [(layer.d_k, layer.d_v) for layer in smaller.metadata.layers[first:last]]
            read = restore_all(read, quantization, shapes, devices, landing.dtype)
        layers += read
    return layers


def _groups(metadata: Metadata) -> Iterator[list[list[TensorInfo]]]:
    """The tensors of each layer that hold entries, several layers at a time: all of them, or as many as CODED allows of codes."""
    layers: list[list[TensorInfo]] = [[] for _ in metadata.layers]
    for info in layout.plan(metadata, with_tokens=False):
        if info.field in STORED_FIELDS:
            layers[info.layer].append(info)
    if metadata.quantization is None:
        yield layers
        return
    group: list[list[TensorInfo]] = []
    size = 0
    for one in layers:
        more = sum(info.size for info in one)
        if group and size + more > CODED:
            yield group
            group, size = [], 0
        group.append(one)
        size += more
    yield group


def allocated(info: TensorInfo, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Memory for a tensor of the file in another type and on a device. Raises UnreadableFile when there is not enough."""
    try:
        return fresh(info.shape, dtype, device)
    except RuntimeError as error:
        where = "this machine" if device.type == "cpu" else str(device)
        raise UnreadableFile(
            f"needs {info.size / 2**20:.0f} MiB more of memory, which {where} does not give",
            fix="free memory, or open a smaller budget of it with --budget",
        ) from error


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Parts of one tensor with neighbours made one: those of all heads, when all of each is wanted."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = Part(part.info, joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _split(parts: Sequence[Part], tensor: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Each part and the numbers of the tensor, end to end, that it becomes."""
    rest = tensor.view(-1)
    for part in parts:
        count = part.size // layout.ITEM_BYTES[part.info.dtype]
        yield part, rest[:count]
        rest = rest[count:]


def landed(layers: list[LayerEntries], about: Metadata, landing: Landing) -> list[LayerEntries]:
    """Entries that were read before it was known where they are wanted. Empties the list as it goes on, so that their memory is free."""
    import torch

    done: list[LayerEntries] = []
    shapes = [(layer.d_k, layer.d_v) for layer in about.layers]
    count = torch.get_num_threads()  # what a CPU restores side by side
    while layers:
        some, layers[:count] = layers[:count], []
        these = slice(len(done), len(done) + len(some))
        if about.quantization is None:
            done += map(_landed, some, landing.devices[these], [landing.dtype] * len(some))
        else:
            done += restore_all(some, about.quantization, shapes[these], landing.devices[these], landing.dtype)
    return done


def _landed(layer: LayerEntries, device: torch.device, dtype: torch.dtype) -> LayerEntries:
    keys, values = (_moved(tensor, device, dtype) for tensor in (layer.keys, layer.values))
    return LayerEntries(keys, values, layer.offsets.to(device), layer.positions.to(device), layer.admit, layer.scores)


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cpu" or tensor.dtype == dtype:
        return tensor.to(device, dtype)
    return fresh(tensor.shape, dtype).copy_(tensor)
