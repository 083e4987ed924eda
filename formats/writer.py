"""Writing a KV file: everything is checked first, tensors are hashed while they are written, the header comes last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from formats import header as headers
from formats import layout, semantics
from formats.entries import ENTRY_FIELDS, INDEX_FIELDS, LayerEntries, raw_bytes, torch_dtype
from formats.errors import CorruptFile, WriteFailed, naming
from formats.hashing import digest, run_bytes, spans
from formats.layout import TensorInfo
from formats.metadata import Metadata
from formats.temporary import replacing

if TYPE_CHECKING:
    from torch import Tensor


def write_file(
    path: str | os.PathLike[str],
    metadata: Metadata,
    layers: Sequence[LayerEntries],
    tokens: Tensor | None,
    *,
    overwrite: bool = False,
    block_bytes: int = layout.DEFAULT_BLOCK_BYTES,
) -> int:
    """Write a file in one step and return its size in bytes; the same input gives the same bytes.

    Tensors may lie on any device; no second copy of those in host memory is made. Raises ExistingFile, or WriteFailed
    also when the content is none that a file may hold. Whatever stood at `path` stays unless the whole file is written.
    """
    with naming(path):
        tensors = _named(metadata, layers, tokens)
        with _storable():
            Metadata.from_json(metadata.to_json())
            infos = layout.plan(metadata, tokens is not None)
            _check(metadata, infos, tensors)
        runs = ((info, run) for info in infos for run in _runs(tensors[info.name], block_bytes))
        return store(path, metadata, infos, runs, overwrite=overwrite, block_bytes=block_bytes)


def store(
    path: str | os.PathLike[str],
    metadata: Metadata,
    infos: Sequence[TensorInfo],
    runs: Iterable[tuple[TensorInfo, memoryview]],
    *,
    overwrite: bool,
    block_bytes: int,
) -> int:
    """Write a file whose tensors come in as runs of bytes, in file order, and return its size in bytes.

    infos: `layout.plan` of the metadata. runs: whole blocks each, but for the last of a tensor; they are taken one by one
    while the file is written. Their content is not checked. Raises as write_file does.
    """
    with _storable():
        # Hashes have a fixed length, so the place of the data is known before them.
        draft = headers.build(metadata, infos, None, block_bytes)
        size = len(draft) + infos[-1].stop
        headers.check(draft[8:].decode("ascii"), size)
    hashes: dict[str, list[str]] = {info.name: [] for info in infos}
    with replacing(path, overwrite=overwrite) as fd:
        os.lseek(fd, len(draft), os.SEEK_SET)
        for info, data in runs:
            hashes[info.name] += [digest(data[low:high]) for low, high in spans(0, len(data), block_bytes)]
            _write(fd, data)
        _write(fd, memoryview(headers.build(metadata, infos, hashes, block_bytes)), at=0)
    return size


@contextmanager
def _storable() -> Iterator[None]:
    """What no reader would take is not written."""
    try:
        yield
    except CorruptFile as error:
        raise WriteFailed(
            f"cannot be stored: {error.what}",
            where=error.where,
            fix="please report this: it is a fault in the program",
        ) from error


def _named(metadata: Metadata, layers: Sequence[LayerEntries], tokens: Tensor | None) -> dict[str, Tensor]:
    if len(layers) != len(metadata.layers):
        raise WriteFailed(f"cannot be stored: {len(layers)} layers, the metadata has {len(metadata.layers)}")
    named = {} if tokens is None else {"tokens": tokens}
    for index, layer in enumerate(layers):
        named |= {f"layers.{index}.{field}": getattr(layer, field) for field in (*INDEX_FIELDS, *ENTRY_FIELDS)}
    return named


def _check(metadata: Metadata, infos: Iterable[TensorInfo], tensors: Mapping[str, Tensor]) -> None:
    """What the reader would refuse in tensors: a file that cannot be read back is never written."""
    for info in infos:
        tensor = tensors[info.name]
        if tuple(tensor.shape) != info.shape or tensor.dtype != torch_dtype(info.dtype):
            raise CorruptFile(
                f"is {tensor.dtype} {list(tensor.shape)}, the metadata implies {info.dtype} {list(info.shape)}",
                where=info.name,
            )
    if "tokens" in tensors:
        semantics.check_tokens(tensors["tokens"].detach().cpu())
    for index, layer in enumerate(metadata.layers):
        part = {field: tensors[f"layers.{index}.{field}"].detach().cpu() for field in INDEX_FIELDS}
        semantics.check_layer(index, layer, metadata.document, metadata.budget, part)


def _runs(tensor: Tensor, block_bytes: int) -> Iterator[memoryview]:
    """The tensor's bytes, at most 4 MiB at a time."""
    data = raw_bytes(tensor.detach().cpu().contiguous())
    for start, stop in spans(0, len(data), run_bytes(block_bytes)):
        yield data[start:stop]


def _write(fd: int, data: memoryview, at: int | None = None) -> None:
    """Write all of the data, at the descriptor's position or at byte `at`."""
    if at is not None:
        os.lseek(fd, at, os.SEEK_SET)
    while data:
        data = data[os.write(fd, data) :]
