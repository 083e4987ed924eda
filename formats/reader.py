"""Reading a KV file: nothing is handed out before every byte of it has been checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from formats import header as headers
from formats import layout, semantics
from formats.entries import INDEX_FIELDS, STORED_FIELDS, IndexPart, LayerEntries, allocate, raw_bytes
from formats.errors import UnreadableFile, naming
from formats.header import Header
from formats.landing import Land, read_onto
from formats.layout import TensorInfo
from formats.partial import Part, read_parts
from formats.smaller import Choose, Smaller, cut
from formats.source import Place, Source, open_source

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Contents:
    """A whole file: one LayerEntries per layer in host memory, and the document's token ids [n] int32 if stored.

    Entries are as they are stored: `header.metadata.quantization` says whether they are still to be restored. What was read
    onto devices is restored, whatever that says.
    """

    header: Header
    layers: tuple[LayerEntries, ...]
    tokens: Tensor | None


def read_header(path: Place) -> Header:
    """Read and check the header alone: metadata, shapes, hashes, file size. Imports neither torch nor numpy.

    Raises UnreadableFile, NotAKVFile, UnsupportedVersion or CorruptFile.
    """
    with naming(path), open_source(path) as source:
        return headers.parse(source)


def read_file(
    path: Place, *, choose: Choose | None = None, threads: int | None = None, onto: Land | None = None
) -> Contents:
    """Read everything into freshly allocated tensors; the bytes hashed are the bytes handed out.

    choose: gives a smaller budget than the file's own, whose entries alone are read, with the blocks that cover them alone
    checked; `header.metadata` of the contents is then that of the smaller file, all else in the header the file's own.
    onto: says for the metadata where keys and values are wanted, and in which type: they go there block by block as they are read
    and checked, with no other copy in host memory.
    Host memory: the entries that stay there, plus a few buffers of at most 4 MiB and, with `onto`, a few layers' codes of
    quantised ones. Raises as read_header does, and what `choose` and `onto` raise.
    """
    with naming(path), open_source(path) as source:
        header = headers.parse(source)
        budget = header.metadata.budget if choose is None else choose(header.metadata)
        landing = None if onto is None else onto(header.metadata)
        smaller = cut(header.metadata, read_index(source, header, threads), budget)
        threads = threads or source.threads
        read = _entries if landing is None else partial(read_onto, landing=landing)
        layers = tuple(read(source, header, smaller, threads))
        return Contents(replace(header, metadata=smaller.metadata), layers, smaller.index.tokens)


def _entries(source: Source, header: Header, smaller: Smaller, threads: int) -> tuple[LayerEntries, ...]:
    """Keys, values and grids of the rows that are kept, all of them read as one plan."""
    infos = [info for info in layout.plan(smaller.metadata, with_tokens=False) if info.field in STORED_FIELDS]
    fields: list[dict[str, Tensor]] = [dict(part) for part in smaller.index.layers]
    wanted: list[tuple[Part, memoryview]] = []
    for info, tensor in zip(infos, _allocate(infos), strict=True):
        fields[info.layer][info.field] = tensor
        out = raw_bytes(tensor)
        for part in smaller.parts(header.tensors[info.name]):
            wanted.append((part, out[: part.size]))
            out = out[part.size :]
    read_parts(source, header, wanted, threads)
    return tuple(LayerEntries(**layer) for layer in fields)


def read_index(source: Source, header: Header, threads: int | None = None) -> IndexPart:
    """Read and check which entries there are, from which positions and budgets on: all but keys, values and their grids."""
    infos = [info for info in header.tensors.values() if info.field not in STORED_FIELDS]
    named = {
        info.name: tensor
        for info, tensor in zip(infos, _read(source, header, infos, threads or source.threads), strict=True)
    }
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
    tensors = _allocate(infos)
    wanted = [(Part(info, 0, info.size), raw_bytes(tensor)) for info, tensor in zip(infos, tensors, strict=True)]
    read_parts(source, header, wanted, threads)
    return tensors


def _allocate(infos: list[TensorInfo]) -> list[Tensor]:
    # The header has been checked against the file's size, so this allocates a bounded multiple of it.
    try:
        return [allocate(info) for info in infos]
    except RuntimeError as error:
        need = sum(info.size for info in infos)
        raise UnreadableFile(
            f"needs {need / 2**20:.0f} MiB of memory, which this machine does not give",
            fix="free memory, or open a smaller budget of it with --budget",
        ) from error
