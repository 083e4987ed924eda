"""A file from a part of a file, copied run by run: a smaller budget, or all but the token ids. No model, no document is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from formats import header as headers
from formats import layout
from formats.entries import STORED_FIELDS, IndexPart, raw_bytes
from formats.errors import naming
from formats.hashing import run_bytes, spans
from formats.header import Header
from formats.layout import TensorInfo
from formats.metadata import Metadata
from formats.partial import Part, read_parts
from formats.reader import read_index
from formats.smaller import Choose, Smaller, cut
from formats.source import Place, Source, open_source
from formats.writer import store

if TYPE_CHECKING:
    from torch import Tensor

BATCH_BYTES = 8 << 20  # of the new file that are read, checked and written at once


@dataclass(frozen=True)
class ShrinkReport:
    """What became of what: metadata and size of the new file, and those of the old one."""

    metadata: Metadata
    file_bytes: int
    old_metadata: Metadata
    old_file_bytes: int


@dataclass(frozen=True)
class _Run:
    """Whole blocks of a tensor of the new file: `size` bytes, which are these parts of the old file end to end."""

    info: TensorInfo
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def shrink_file(
    place: Place,
    target: str | os.PathLike[str],
    choose: Choose,
    *,
    writer: str,
    overwrite: bool = False,
    threads: int | None = None,
) -> ShrinkReport:
    """Write to `target` what the file at `place` keeps at the smaller budget that `choose` gives for its metadata.

    writer: program and version, for the new file. Both may be one file when `overwrite` is set: it stays as it is until
    the new one is complete. Only the blocks that cover the kept entries are read and checked. Quantised entries keep their
    codes and grids, a compressed file its level. Host memory: the index tensors, BATCH_BYTES, and for each thread a few
    buffers of at most 4 MiB. Raises what read_header, write_file and `choose` raise.
    """
    with naming(place), open_source(place) as source:
        old = headers.parse(source)
        budget = choose(old.metadata)
        smaller = cut(old.metadata, read_index(source, old, threads), budget)
        smaller = replace(smaller, metadata=replace(smaller.metadata, writer=writer))
        size = copy_part(place, source, old, smaller, target, overwrite=overwrite, threads=threads or source.threads)
        return ShrinkReport(smaller.metadata, size, old.metadata, old.file_bytes)


def copy_without_tokens(place: Place, target: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write the file to `target` without its tensor of token ids, and return the size of the copy in bytes.

    Every byte is checked on its way. A file that holds no token ids gives the same bytes again. Memory as in shrink_file.
    Raises what read_file raises, ExistingFile or WriteFailed.
    """
    with naming(place), open_source(place) as source:
        old = headers.parse(source)
        whole = cut(old.metadata, read_index(source, old), old.metadata.budget)
        bare = replace(whole, index=replace(whole.index, tokens=None))
        return copy_part(place, source, old, bare, target, overwrite=overwrite, threads=source.threads)


def copy_part(
    place: Place,
    source: Source,
    old: Header,
    part: Smaller,
    target: str | os.PathLike[str],
    *,
    overwrite: bool,
    threads: int,
) -> int:
    """Write a part of a file, with the metadata and the index that it says, and return the new file's size in bytes."""
    infos = layout.plan(part.metadata, part.index.tokens is not None)
    with naming(target):
        return store(
            target,
            part.metadata,
            infos,
            partial(_runs, place, source, old, part, threads),
            overwrite=overwrite,
            block_bytes=old.block_bytes,
            zstd=old.zstd,
            threads=threads,
        )


def _runs(
    place: Place,
    source: Source,
    old: Header,
    smaller: Smaller,
    threads: int,
    infos: Sequence[TensorInfo],
) -> Iterator[tuple[TensorInfo, memoryview]]:
    """The bytes of some of the new file's tensors, in their order."""
    entries: list[_Run] = []
    for info in infos:
        if info.field in STORED_FIELDS:
            entries += _entry_runs(old, smaller, info)
            continue
        data = raw_bytes(_indexed(smaller.index, info))
        for start, stop in spans(0, len(data), run_bytes(old.block_bytes)):
            yield info, data[start:stop]
    for batch in _batches(entries):
        with naming(place):  # the target's name stands around this, but it is the old file that would be damaged
            buffers = _read(source, old, batch, threads)
        yield from ((run.info, data) for run, data in zip(batch, buffers, strict=True))


def _indexed(index: IndexPart, info: TensorInfo) -> Tensor:
    """An index tensor, or the tokens."""
    if info.name == "tokens":
        assert index.tokens is not None
        return index.tokens
    return index.layers[info.layer][info.field]


def _entry_runs(old: Header, smaller: Smaller, info: TensorInfo) -> Iterator[_Run]:
    """A tensor of the new file in runs of at most 4 MiB."""
    parts = smaller.parts(old.tensors[info.name])
    for start, stop in spans(0, info.size, run_bytes(old.block_bytes)):
        yield _Run(info, tuple(_within(parts, start, stop)))


def _within(parts: Sequence[Part], start: int, stop: int) -> Iterator[Part]:
    """Bytes [start, stop) of the parts laid end to end."""
    at = 0
    for part in parts:
        low, high = max(start, at), min(stop, at + part.size)
        if low < high:
            yield Part(part.info, part.start + low - at, part.start + high - at)
        at += part.size


def _batches(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Runs in order, as many together as BATCH_BYTES hold."""
    batch: list[_Run] = []
    for run in runs:
        if batch and sum(one.size for one in batch) + run.size > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(run)
    if batch:
        yield batch


def _read(source: Source, old: Header, batch: Sequence[_Run], threads: int) -> list[memoryview]:
    buffers = [memoryview(bytearray(run.size)) for run in batch]
    wanted: list[tuple[Part, memoryview]] = []
    for run, rest in zip(batch, buffers, strict=True):
        for part in run.parts:
            wanted.append((part, rest[: part.size]))
            rest = rest[part.size :]
    read_parts(source, old, wanted, threads)
    return buffers
