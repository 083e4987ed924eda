"""Reading a KV file: nothing is handed out before every byte of it has been checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats import header as headers
from formats import semantics
from formats.blocks import read_tensors
from formats.entries import INDEX_FIELDS, STORED_FIELDS, IndexPart, LayerEntries, allocate, raw_bytes
from formats.errors import UnreadableFile, naming
from formats.header import Header
from formats.layout import TensorInfo
from formats.source import Source, open_source

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Contents:
    """A whole file: one LayerEntries per layer in host memory, and the document's token ids [n] int32 if stored.

    Entries are as they are stored: `header.metadata.quantization` says whether they are still to be restored.
    """

    header: Header
    layers: tuple[LayerEntries, ...]
    tokens: Tensor | None


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header alone: metadata, shapes, hashes, file size. Imports neither torch nor numpy.

    Raises UnreadableFile, NotAKVFile, UnsupportedVersion or CorruptFile.
    """
    with naming(path), open_source(path) as source:
        return headers.parse(source)


def read_file(path: str | os.PathLike[str], *, threads: int = 4) -> Contents:
    """Read everything into freshly allocated tensors; the bytes hashed are the bytes handed out.

    Host memory: the entries, plus a few buffers of at most 4 MiB. Raises as read_header does.
    """
    with naming(path), open_source(path) as source:
        header = headers.parse(source)
        index = read_index(source, header, threads)
        infos = [info for info in header.tensors.values() if info.field in STORED_FIELDS]
        fields: list[dict[str, Tensor]] = [dict(part) for part in index.layers]
        for info, tensor in zip(infos, _read(source, header, infos, threads), strict=True):
            fields[int(info.name.split(".")[1])][info.field] = tensor
        return Contents(header, tuple(LayerEntries(**layer) for layer in fields), index.tokens)


def read_index(source: Source, header: Header, threads: int = 4) -> IndexPart:
    """Read and check which entries there are, from which positions and budgets on: all but keys, values and their grids."""
    infos = [info for info in header.tensors.values() if info.field not in STORED_FIELDS]
    named = {info.name: tensor for info, tensor in zip(infos, _read(source, header, infos, threads), strict=True)}
    metadata = header.metadata
    tokens = named.get("tokens")
    if tokens is not None:
        semantics.check_tokens(tokens)
    layers = []
    for index, layer in enumerate(metadata.layers):
        part = {field: named[f"layers.{index}.{field}"] for field in INDEX_FIELDS}
        semantics.check_layer(index, layer, metadata.document, metadata.budget, part)
        if metadata.quantization is not None:
            semantics.check_groups(index, layer, metadata.quantization, part["offsets"].tolist())
        layers.append(part)
    return IndexPart(tuple(layers), tokens)


def _read(source: Source, header: Header, infos: list[TensorInfo], threads: int) -> list[Tensor]:
    # The header has been checked against the file's size, so this allocates no more than the file holds.
    try:
        tensors = [allocate(info) for info in infos]
    except RuntimeError as error:
        need = sum(info.size for info in infos)
        raise UnreadableFile(
            f"needs {need / 2**20:.0f} MiB of memory, which this machine does not give",
            fix="free memory, or make the file with a smaller --budget",
        ) from error
    jobs = [(info, raw_bytes(tensor)) for info, tensor in zip(infos, tensors, strict=True)]
    read_tensors(source, header, jobs, threads)
    return tensors
