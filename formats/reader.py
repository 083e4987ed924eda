"""Reading a KV file: nothing is handed out before every byte of it has been checked."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from formats import header as headers
from formats import semantics
from formats.entries import ENTRY_FIELDS, INDEX_FIELDS, IndexPart, LayerEntries, allocate, raw_bytes
from formats.errors import UnreadableFile, naming
from formats.header import Header
from formats.layout import ITEM_BYTES, TensorInfo
from formats.partial import Part, read_parts
from formats.smaller import Choose, Smaller, cut
from formats.source import Source, open_source

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Contents:
    """A whole file: one LayerEntries per layer in host memory, and the document's token ids [n] int32 if stored."""

    header: Header
    layers: tuple[LayerEntries, ...]
    tokens: Tensor | None


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header alone: metadata, shapes, hashes, file size. Imports neither torch nor numpy.

    Raises UnreadableFile, NotAKVFile, UnsupportedVersion or CorruptFile.
    """
    with naming(path), open_source(path) as source:
        return headers.parse(source)


def read_file(path: str | os.PathLike[str], *, choose: Choose | None = None, threads: int = 4) -> Contents:
    """Read everything into freshly allocated tensors; the bytes hashed are the bytes handed out.

    choose: gives a smaller budget than the file's own, whose entries alone are read, with the blocks that cover them alone
    checked; `header.metadata` of the contents is then that of the smaller file, all else in the header the file's own.
    Host memory: the entries, plus a few buffers of at most 4 MiB. Raises as read_header does, and what `choose` raises.
    """
    with naming(path), open_source(path) as source:
        header = headers.parse(source)
        budget = header.metadata.budget if choose is None else choose(header.metadata)
        smaller = cut(header.metadata, read_index(source, header, threads), budget)
        layers = tuple(_entries(source, header, smaller, threads))
        return Contents(replace(header, metadata=smaller.metadata), layers, smaller.index.tokens)


def _entries(source: Source, header: Header, smaller: Smaller, threads: int) -> list[LayerEntries]:
    """Keys and values of the rows that are kept, all of them read as one plan."""
    whole = [header.tensors[f"layers.{n}.{field}"] for n in range(len(smaller.rows)) for field in ENTRY_FIELDS]
    infos = [
        replace(info, shape=(smaller.metadata.layers[n // 2].entries, info.shape[1])) for n, info in enumerate(whole)
    ]
    tensors = _allocate(infos)
    wanted: list[tuple[Part, memoryview]] = []
    for number, (info, tensor) in enumerate(zip(whole, tensors, strict=True)):
        out = raw_bytes(tensor)
        for part in smaller.parts(number // 2, info):
            wanted.append((part, out[: part.stop - part.start]))
            out = out[part.stop - part.start :]
    read_parts(source, header, wanted, threads)
    rows = zip(tensors[::2], tensors[1::2], smaller.index.layers, strict=True)
    return [LayerEntries(keys, values, **part) for keys, values, part in rows]


def read_index(source: Source, header: Header, threads: int = 4) -> IndexPart:
    """Read and check everything but keys and values: which entries there are, from which positions and budgets on."""
    infos = [info for name, info in header.tensors.items() if not name.endswith((".keys", ".values"))]
    named = {info.name: tensor for info, tensor in zip(infos, _read(source, header, infos, threads), strict=True)}
    metadata = header.metadata
    tokens = named.get("tokens")
    if tokens is not None:
        semantics.check_tokens(tokens)
    layers = []
    for index, layer in enumerate(metadata.layers):
        part = {field: named[f"layers.{index}.{field}"] for field in INDEX_FIELDS}
        semantics.check_layer(index, layer, metadata.document, metadata.budget, part)
        layers.append(part)
    return IndexPart(tuple(layers), tokens)


def _read(source: Source, header: Header, infos: list[TensorInfo], threads: int) -> list[Tensor]:
    tensors = _allocate(infos)
    wanted = [(Part(info, 0, info.size), raw_bytes(tensor)) for info, tensor in zip(infos, tensors, strict=True)]
    read_parts(source, header, wanted, threads)
    return tensors


def _allocate(infos: list[TensorInfo]) -> list[Tensor]:
    # The header has been checked against the file's size, so this allocates no more than the file holds.
    try:
        return [allocate(info) for info in infos]
    except RuntimeError as error:
        need = sum(math.prod(info.shape) * ITEM_BYTES[info.dtype] for info in infos)
        raise UnreadableFile(
            f"needs {need / 2**20:.0f} MiB of memory, which this machine does not give",
            fix="free memory, or open a smaller budget of it with --budget",
        ) from error
