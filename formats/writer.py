"""Writing a KV file: everything is checked first, blocks are hashed beside the writing, the header comes last."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from formats import codecs, layout, semantics
from formats import header as headers
from formats.entries import INDEX_FIELDS, STORED_FIELDS, LayerEntries, raw_bytes, torch_dtype
from formats.errors import CorruptFile, WriteFailed, naming
from formats.hashing import DIGITS, digest, run_bytes, spans
from formats.layout import ITEM_BYTES, TensorInfo
from formats.metadata import Metadata
from formats.temporary import replacing

if TYPE_CHECKING:
    from torch import Tensor

# Gives the bytes of some tensors as runs, in their order: whole blocks each, but for the last of a tensor, of about 4 MiB.
Runs = Callable[[Sequence[TensorInfo]], Iterable[tuple[TensorInfo, memoryview]]]


def write_file(
    path: str | os.PathLike[str],
    metadata: Metadata,
    layers: Sequence[LayerEntries],
    tokens: Tensor | None,
    *,
    overwrite: bool = False,
    block_bytes: int = layout.DEFAULT_BLOCK_BYTES,
    zstd: int | None = None,
    threads: int = 4,
) -> int:
    """Write a file in one step and return its size in bytes; the same input gives the same bytes.

    layers: as they are to be stored, so quantised ones where the metadata says so. zstd: level at which tensors are
    compressed that get smaller by it, None for none; the same bytes then take the same zstandard library too.
    Tensors may lie on any device; no second copy of those in host memory is made. Raises ExistingFile, or WriteFailed
    also when the content is none that a file may hold. Whatever stood at `path` stays unless the whole file is written.
    """
    with naming(path):
        tensors = _named(metadata, layers, tokens)
        with storable():
            Metadata.from_json(metadata.to_json())
            infos = layout.plan(metadata, tokens is not None)
            _check(metadata, infos, tensors)
        runs = partial(_runs, tensors, block_bytes)
        return store(
            path, metadata, infos, runs, overwrite=overwrite, block_bytes=block_bytes, zstd=zstd, threads=threads
        )


def store(
    path: str | os.PathLike[str],
    metadata: Metadata,
    infos: Sequence[TensorInfo],
    runs: Runs,
    *,
    overwrite: bool,
    block_bytes: int,
    zstd: int | None = None,
    threads: int = 4,
) -> int:
    """Write a file whose tensors come in as runs of bytes and return its size in bytes.

    infos: `layout.plan` of the metadata. runs: asked for a few tensors at a time, taken one by one while the file is written,
    and asked for a tensor a second time when compressing it did not pay; their bytes must stay as they are. Only codes and
    grids among them are checked. Raises as write_file does. Memory: a few runs for each thread.
    """
    with storable():
        Metadata.from_json(metadata.to_json())
        # A header like this can be written: found out before the work, and without codecs it has its length.
        draft = headers.build(metadata, infos, None, block_bytes)
        headers.check(draft[8:].decode("ascii"), len(draft) + infos[-1].stop)
    begin = len(draft) if zstd is None else _most_header_bytes(metadata, infos, block_bytes)
    threads = max(1, threads)
    with (
        replacing(path, overwrite=overwrite) as fd,
        ThreadPoolExecutor(threads, thread_name_prefix="dropkv-write") as pool,
    ):
        work = _Work(fd, pool, threads, block_bytes)
        os.lseek(fd, begin, os.SEEK_SET)
        done = work.raw(infos, runs) if zstd is None else [work.compressed(info, runs, zstd) for info in infos]
        placed = layout.place(done)
        hashes = {info.name: info.blocks for info in placed}
        level = zstd if any(info.codec != "raw" for info in placed) else None
        front = headers.build(metadata, placed, hashes, block_bytes, level)
        size = len(front) + placed[-1].stop
        if sum(info.size for info in placed) > codecs.most_raw(size):
            raise WriteFailed(
                "these entries shrink so much that readers would take the file for a bomb", fix="leave --zstd out"
            )
        if begin > len(front):
            _move_down(fd, begin, len(front), placed[-1].stop)
        write_all(fd, memoryview(front), at=0)
    return size


class _Work:
    """Tensors on their way into a file: hashed, checked and compressed by the pool, written here in order."""

    def __init__(self, fd: int, pool: ThreadPoolExecutor, threads: int, block_bytes: int) -> None:
        self.fd = fd
        self.pool = pool
        self.ahead = 2 * threads  # runs in work at once
        self.block_bytes = block_bytes

    def raw(self, infos: Sequence[TensorInfo], runs: Runs) -> list[TensorInfo]:
        """Write tensors as they are; gives them with their hashes."""
        hashes: dict[str, list[str]] = {info.name: [] for info in infos}
        done: dict[str, int] = {info.name: 0 for info in infos}
        pending: deque[tuple[TensorInfo, Future[list[str]]]] = deque()

        def settle(most: int) -> None:
            while len(pending) > most:
                info, future = pending.popleft()
                hashes[info.name] += future.result()

        for info, data in runs(infos):
            pending.append((info, self.pool.submit(_hash_run, info, done[info.name], data, self.block_bytes)))
            done[info.name] += len(data)
            write_all(self.fd, data)
            settle(self.ahead)
        settle(0)
        assert all(done[info.name] == info.size for info in infos)
        return [replace(info, blocks=tuple(hashes[info.name])) for info in infos]

    def compressed(self, info: TensorInfo, runs: Runs, level: int) -> TensorInfo:
        """Write a tensor block by block as zstd frames, or as it is where that saves too little."""
        start = os.lseek(self.fd, 0, os.SEEK_CUR)
        pending: deque[Future[list[_Frame]]] = deque()
        frames: list[_Frame] = []  # without their bytes
        written, at = 0, 0
        todo = iter(runs([info]))
        while True:
            while len(pending) < self.ahead and (run := next(todo, None)) is not None:
                pending.append(self.pool.submit(_compress_run, info, at, run[1], self.block_bytes, level))
                at += len(run[1])
            if not pending:
                break
            for frame in pending.popleft().result():
                written += frame.size
                if not codecs.worthwhile(info.size, written):
                    for future in pending:
                        future.cancel()
                    os.lseek(self.fd, start, os.SEEK_SET)
                    os.ftruncate(self.fd, start)
                    return self.raw([info], runs)[0]
                write_all(self.fd, memoryview(frame.data))
                frames.append(replace(frame, data=b""))
        if not frames:
            return info
        return replace(
            info,
            codec="zstd",
            blocks=tuple(frame.raw for frame in frames),
            sizes=tuple(frame.size for frame in frames),
            stored=tuple(frame.stored for frame in frames),
        )


@dataclass(frozen=True)
class _Frame:
    """A compressed block, and the hashes of its raw and its stored bytes."""

    data: bytes
    size: int
    raw: str
    stored: str


def _hash_run(info: TensorInfo, start: int, data: memoryview, block_bytes: int) -> list[str]:
    with storable():
        semantics.check_codes(info, start, data)
    return [digest(data[low:high]) for low, high in spans(0, len(data), block_bytes)]


def _compress_run(info: TensorInfo, start: int, data: memoryview, block_bytes: int, level: int) -> list[_Frame]:
    with storable():
        semantics.check_codes(info, start, data)
    frames = []
    for low, high in spans(0, len(data), block_bytes):
        frame = codecs.encode(data[low:high], ITEM_BYTES[info.dtype], level)
        frames.append(_Frame(frame, len(frame), digest(data[low:high]), digest(frame)))
    return frames


def _most_header_bytes(metadata: Metadata, infos: Sequence[TensorInfo], block_bytes: int) -> int:
    """A length that the header of these tensors cannot exceed, whichever of them are compressed."""
    longest = codecs.most_stored(block_bytes)
    counts = {info.name: layout.block_count(info.size, block_bytes) for info in infos}
    # Where a row has sizes and hashes of what is stored; the places of raw tensors have at least as many digits.
    widest = [
        replace(
            info,
            codec="zstd" if counts[info.name] else "raw",
            sizes=(longest,) * counts[info.name] if counts[info.name] else None,
            stored=("0" * DIGITS,) * counts[info.name],
        )
        for info in infos
    ]
    return len(headers.build(metadata, widest, None, block_bytes, codecs.LEVELS[1])) + 64 * len(infos)


def _move_down(fd: int, source: int, target: int, length: int) -> None:
    """Move `length` bytes of the file to a place before them, and end the file there."""
    step = 4 << 20
    for start in range(0, length, step):
        data = os.pread(fd, min(step, length - start), source + start)
        write_all(fd, memoryview(data), at=target + start)
    os.ftruncate(fd, target + length)


@contextmanager
def storable() -> Iterator[None]:
    """What no reader would take is not written: CorruptFile becomes WriteFailed, unless it names the file it found the fault in."""
    try:
        yield
    except CorruptFile as error:
        if error.path:
            raise
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
        for field in (*INDEX_FIELDS, *STORED_FIELDS):
            if getattr(layer, field) is not None:
                named[f"layers.{index}.{field}"] = getattr(layer, field)
    return named


def _check(metadata: Metadata, infos: Iterable[TensorInfo], tensors: Mapping[str, Tensor]) -> None:
    """What the reader would refuse in tensors: a file that cannot be read back is never written."""
    names = {info.name for info in infos}
    for name in [*names - tensors.keys(), *tensors.keys() - names]:
        there = "is there" if name in tensors else "is missing"
        raise CorruptFile(f"{there}, the metadata implies otherwise", where=name)
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
        if metadata.quantization is not None:
            semantics.check_groups(index, layer, metadata.quantization, part["offsets"].tolist())


def _runs(
    tensors: Mapping[str, Tensor], block_bytes: int, infos: Sequence[TensorInfo]
) -> Iterator[tuple[TensorInfo, memoryview]]:
    """The tensors' bytes, at most 4 MiB at a time."""
    for info in infos:
        data = raw_bytes(tensors[info.name].detach().cpu().contiguous())
        for start, stop in spans(0, len(data), run_bytes(block_bytes)):
            yield info, data[start:stop]


def write_all(fd: int, data: memoryview, at: int | None = None) -> None:
    """Write all of the data, at the descriptor's position or at byte `at`."""
    if at is not None:
        os.lseek(fd, at, os.SEEK_SET)
    while data:
        data = data[os.write(fd, data) :]
