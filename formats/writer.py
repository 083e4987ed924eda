"""Writing a KV file: everything is checked first, tensors are hashed while they are written, the header comes last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
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
        try:
            Metadata.from_json(metadata.to_json())
            infos = layout.plan(metadata, tokens is not None)
            _check(metadata, infos, tensors)
            # Hashes have a fixed length, so the place of the data is known before them.
            draft = headers.build(metadata, infos, None, block_bytes)
            size = len(draft) + infos[-1].stop
            headers.check(draft[8:].decode("ascii"), size)
        except CorruptFile as error:
            raise WriteFailed(
                f"cannot be stored: {error.what}",
                where=error.where,
                fix="please report this: it is a fault in the program",
            ) from error
        with replacing(path, overwrite=overwrite) as fd:
            os.lseek(fd, len(draft), os.SEEK_SET)
            hashes = {info.name: _write_tensor(fd, tensors[info.name], block_bytes) for info in infos}
            write_all(fd, memoryview(headers.build(metadata, infos, hashes, block_bytes)), at=0)
        return size


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


def _write_tensor(fd: int, tensor: Tensor, block_bytes: int) -> list[str]:
    """Append the tensor's bytes to the file; returns the hash of each block."""
    data = raw_bytes(tensor.detach().cpu().contiguous())
    hashes: list[str] = []
    for start, stop in spans(0, len(data), run_bytes(block_bytes)):
        hashes += [digest(data[low:high]) for low, high in spans(start, stop, block_bytes)]
        write_all(fd, data[start:stop])
    return hashes


def write_all(fd: int, data: memoryview, at: int | None = None) -> None:
    """Write all of the data, at the descriptor's position or at byte `at`."""
    if at is not None:
        os.lseek(fd, at, os.SEEK_SET)
    while data:
        data = data[os.write(fd, data) :]
