"""Parts of tensors in few, large reads: all that is wanted is known before the first byte is read.

A part may begin and end anywhere; what is read are the whole blocks that cover it, since only they can be checked. Blocks
of neighbouring parts, heads and tensors share a read where little lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from formats.blocks import block_place, blocks_before, check_block, check_blocks, run_all
from formats.entries import torch_dtype
from formats.header import Header
from formats.layout import ITEM_BYTES, TensorInfo
from formats.source import Source
from formats.staging import Buffer, Buffers, staging

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of a tensor, counted as they were before any codec."""

    info: TensorInfo
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Span:
    """Blocks [first, last) of a tensor and the file bytes [start, stop) that they are stored in, end to end."""

    info: TensorInfo
    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True)
class Read:
    """One read of the file, of bytes [start, stop), and the blocks in it that are needed, in file order."""

    start: int
    stop: int
    spans: tuple[Span, ...]


def plan_reads(header: Header, parts: Iterable[Part], *, gap: int, longest: int) -> tuple[Read, ...]:
    """The reads that cover the parts, in file order; no byte is read twice.

    Blocks with at most `gap` bytes between them share a read, of at most `longest` bytes unless one block is longer.
    """
    runs: list[list[Span]] = []
    for info, first, last in _wanted_blocks(header, parts):
        while first < last:
            start, stop = block_place(header, info, first)
            if runs and start - runs[-1][-1].stop <= gap and stop - runs[-1][0].start <= longest:
                end = blocks_before(header, info, runs[-1][0].start + longest, last)
            else:
                runs.append([])
                end = max(first + 1, blocks_before(header, info, start + longest, last))
            runs[-1].append(Span(info, first, end, start, block_place(header, info, end - 1)[1]))
            first = end
    return tuple(Read(run[0].start, run[-1].stop, tuple(run)) for run in runs)


def read_parts(
    source: Source,
    header: Header,
    wanted: Sequence[tuple[Part, memoryview | Tensor]],
    threads: int,
    buffers: Buffers | None = None,
) -> None:
    """Fill each memoryview, or each tensor, with its part; only the blocks that cover the parts are checked.

    A tensor [numbers] may be on any device and of another type than the part's, which its numbers are then turned into; copies may
    still be on their way when this returns, until `buffers` have been waited for (None: there are none that could be).
    Memory: for each buffer one read, and as much again of decompressed bytes. Raises CorruptFile naming tensor and
    block; the memory may then hold some of the parts: drop it.
    """
    if buffers is None:
        with staging(threads) as own:
            return read_parts(source, header, wanted, threads, own)
    places: _Places = {}
    for part, out in wanted:
        assert 0 <= part.start <= part.stop <= part.info.size
        assert part.size == (len(out) if isinstance(out, memoryview) else len(out) * ITEM_BYTES[part.info.dtype])
        places.setdefault(part.info.name, []).append((part, out))
    reads = plan_reads(header, (part for part, _ in wanted), gap=source.gap, longest=source.longest)
    tasks = (partial(_read, source, header, read, places, buffers) for read in reads)
    run_all(tasks, min(threads, buffers.count, len(reads)))


_Places = dict[str, list[tuple[Part, "memoryview | Tensor"]]]  # of each tensor


class _Run:
    """Bytes of one part that stand in a buffer one after another: copied at once, since copies of single blocks are many."""

    def __init__(self, part: Part, out: memoryview | Tensor, low: int, high: int, place: int) -> None:
        self.part, self.out = part, out
        self.low, self.high = low, high
        self.place = place

    def goes_on(self, part: Part, low: int, high: int, place: int) -> bool:
        """Whether these bytes [low, high) of a part, at `place` of the buffer, belong to the run, which they then do."""
        if part is not self.part or low != self.high or place != self.place + self.high - self.low:
            return False
        self.high = high
        return True

    def copy(self, buffer: Buffer, data: memoryview) -> None:
        """From the buffer, whose bytes are `data`, to where they are wanted."""
        size, start = self.high - self.low, self.low - self.part.start
        if isinstance(self.out, memoryview):
            self.out[start : start + size] = data[self.place : self.place + size]
            return
        dtype = torch_dtype(self.part.info.dtype)
        out = self.out[start // dtype.itemsize : (start + size) // dtype.itemsize]
        buffer.send(self.place, self.place + size, dtype, out)


def _read(source: Source, header: Header, read: Read, places: _Places, buffers: Buffers) -> None:
    with buffers.pair() as (stored, unpacked):
        data = stored.take(read.stop - read.start)
        source.read_into(read.start, data)
        runs: list[_Run] = []
        coded: list[Span] = []
        for span in read.spans:
            if span.info.codec != "raw":
                coded.append(span)
                continue
            at = span.start - read.start
            check_blocks(header, span.info, span.first, span.last, data[at : span.stop - read.start])
            _add(runs, places[span.info.name], span.first * header.block_bytes, at, span.stop - span.start)
        _copy_all(runs, stored, data)
        if coded:
            _unpack(header, read, coded, data, places, unpacked, max(source.longest, header.block_bytes))


def _unpack(
    header: Header, read: Read, spans: Sequence[Span], data: memoryview, places: _Places, unpacked: Buffer, room: int
) -> None:
    """Compressed blocks, whose bytes are in `data`: gathered in the buffer until they are as many as a read has, `room` bytes."""
    blocks = [(span.info, number) for span in spans for number in range(span.first, span.last)]
    left = sum(min(header.block_bytes, info.size) for info, _ in blocks)
    raw_data = memoryview(b"")
    runs: list[_Run] = []
    filled = 0
    for info, number in blocks:
        start, stop = block_place(header, info, number)
        raw = check_block(header, info, number, data[start - read.start : stop - read.start])
        if filled + len(raw) > len(raw_data):
            _copy_all(runs, unpacked, raw_data)
            unpacked.sent()
            raw_data, filled = unpacked.take(min(room, left)), 0
        raw_data[filled : filled + len(raw)] = raw
        _add(runs, places[info.name], number * header.block_bytes, filled, len(raw))
        filled += len(raw)
    _copy_all(runs, unpacked, raw_data)


def _add(runs: list[_Run], wanted: list[tuple[Part, memoryview | Tensor]], first: int, at: int, size: int) -> None:
    """What is wanted of `size` raw bytes of a tensor, from its byte `first` on, which stand at `at` of a buffer."""
    for part, out in wanted:
        low, high = max(part.start, first), min(part.stop, first + size)
        if low < high and not (runs and runs[-1].goes_on(part, low, high, at + low - first)):
            runs.append(_Run(part, out, low, high, at + low - first))


def _copy_all(runs: list[_Run], buffer: Buffer, data: memoryview) -> None:
    for run in runs:
        run.copy(buffer, data)
    runs.clear()


def _wanted_blocks(header: Header, parts: Iterable[Part]) -> Iterator[tuple[TensorInfo, int, int]]:
    """The blocks [first, last) of each tensor that cover some of the parts, each once, in file order."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    infos: dict[str, TensorInfo] = {}
    for part in parts:
        if part.start < part.stop:
            infos[part.info.name] = part.info
            blocks = part.start // header.block_bytes, -(-part.stop // header.block_bytes)
            ranges.setdefault(part.info.name, []).append(blocks)
    for info in sorted(infos.values(), key=lambda info: info.start):
        first, last = 0, 0
        for low, high in sorted(ranges[info.name]):
            if low > last:
                if first < last:
                    yield info, first, last
                first = low
            last = max(last, high)
        yield info, first, last
