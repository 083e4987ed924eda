"""Reading a KV file: nothing is handed out before every byte of it has been checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats import header as headers
from formats import semantics
from formats.blocks import read_tensors
from formats.entries import ENTRY_FIELDS, INDEX_FIELDS, IndexPart, LayerEntries, allocate, raw_bytes
from formats.errors import UnreadableFile, naming
from formats.header import Header
from formats.layout import TensorInfo
from formats.source import Place, Source, open_source

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Contents:
    """A whole file: one LayerEntries per layer in host memory, and the document's token ids [n] int32 if stored."""

    header: Header
    layers: tuple[LayerEntries, ...]
    tokens: Tensor | None


def read_header(path: Place) -> Header:
    """Read and check the header alone: metadata, shapes, hashes, file size. Imports neither torch nor numpy.

    Raises UnreadableFile, NotAKVFile, UnsupportedVersion or CorruptFile.
    """
    with naming(path), open_source(path) as source:
        return headers.parse(source)


def read_file(path: Place, *, threads: int = 4) -> Contents:
    """Read everything into freshly allocated tensors; the bytes hashed are the bytes handed out.

    Host memory: the entries, plus a few buffers of at most 4 MiB. Raises as read_header does.
    """
    with naming(path), open_source(path) as source:
        header = headers.parse(source)
        index = read_index(source, header, threads)
        names = [f"layers.{number}.{field}" for number in range(len(index.layers)) for field in ENTRY_FIELDS]
        tensors = _read(source, header, [header.tensors[name] for name in names], threads)
        rows = zip(tensors[::2], tensors[1::2], index.layers, strict=True)
        layers = tuple(LayerEntries(keys, values, **part) for keys, values, part in rows)
        return Contents(header, layers, index.tokens)


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
