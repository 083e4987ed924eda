"""A smaller file from a file: the entries of a smaller budget are copied run by run; no model and no document is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from formats import header as headers
from formats import layout
from formats.entries import raw_bytes
from formats.errors import naming
from formats.hashing import run_bytes, spans
from formats.header import Header
from formats.layout import TensorInfo
from formats.metadata import Metadata
from formats.partial import Part, read_parts
from formats.reader import read_index
from formats.smaller import Choose, Smaller, cut
from formats.source import Source, open_source
from formats.writer import store

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
        return sum(part.stop - part.start for part in self.parts)


def shrink_file(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    choose: Choose,
    *,
    writer: str,
    overwrite: bool = False,
    threads: int = 4,
) -> ShrinkReport:
    """Write to `target` what the file at `path` keeps at the smaller budget that `choose` gives for its metadata.

    writer: program and version, for the new file. Both may be one file when `overwrite` is set: it stays as it is until
    the new one is complete. Only the blocks that cover the kept entries are read and checked. Host memory: the index
    tensors, BATCH_BYTES, and a few buffers of at most 4 MiB. Raises what read_header, write_file and `choose` raise.
    """
    with naming(path), open_source(path) as source:
        old = headers.parse(source)
        budget = choose(old.metadata)
        smaller = cut(old.metadata, read_index(source, old, threads), budget)
        metadata = replace(smaller.metadata, writer=writer)
        infos = layout.plan(metadata, smaller.index.tokens is not None)
        with naming(target):
            runs = _runs(path, source, old, smaller, infos, threads)
            size = store(target, metadata, infos, runs, overwrite=overwrite, block_bytes=old.block_bytes)
        return ShrinkReport(metadata, size, old.metadata, old.file_bytes)


def _runs(
    path: str | os.PathLike[str],
    source: Source,
    old: Header,
    smaller: Smaller,
    infos: Sequence[TensorInfo],
    threads: int,
) -> Iterator[tuple[TensorInfo, memoryview]]:
    """The bytes of the new file's tensors, in its order."""
    for info in infos:
        if info.name == "tokens":
            assert smaller.index.tokens is not None
            yield info, raw_bytes(smaller.index.tokens)
            continue
        _, layer, field = info.name.split(".")
        if field in smaller.index.layers[int(layer)]:
            yield info, raw_bytes(smaller.index.layers[int(layer)][field])
    entries = [run for info in infos for run in _entry_runs(old, smaller, info)]
    for batch in _batches(entries):
        with naming(path):  # the target's name stands around this, but it is the old file that would be damaged
            buffers = _read(source, old, batch, threads)
        yield from ((run.info, data) for run, data in zip(batch, buffers, strict=True))


def _entry_runs(old: Header, smaller: Smaller, info: TensorInfo) -> Iterator[_Run]:
    """A tensor of keys or values of the new file in runs of at most 4 MiB; nothing for other tensors."""
    if not info.name.endswith((".keys", ".values")):
        return
    parts = smaller.parts(int(info.name.split(".")[1]), old.tensors[info.name])
    for start, stop in spans(0, info.size, run_bytes(old.block_bytes)):
        yield _Run(info, tuple(_within(parts, start, stop)))


def _within(parts: Sequence[Part], start: int, stop: int) -> Iterator[Part]:
    """Bytes [start, stop) of the parts laid end to end."""
    at = 0
    for part in parts:
        low, high = max(start, at), min(stop, at + part.stop - part.start)
        if low < high:
            yield Part(part.info, part.start + low - at, part.start + high - at)
        at += part.stop - part.start


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
            wanted.append((part, rest[: part.stop - part.start]))
            rest = rest[part.stop - part.start :]
    read_parts(source, old, wanted, threads)
    return buffers
