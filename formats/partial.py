"""Parts of tensors in few, large reads: all that is wanted is known before the first byte is read.

A part may begin and end anywhere; what is read are the whole blocks that cover it, since only they can be checked. Blocks
of neighbouring parts, heads and tensors share a read where little lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from formats.blocks import block_place, check_block, run_all
from formats.header import Header
from formats.layout import TensorInfo
from formats.source import Source


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
class Block:
    """A block of a tensor and the file bytes [start, stop) that it is stored in."""

    info: TensorInfo
    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Read:
    """One read of the file, of bytes [start, stop), and the blocks in it that are needed, in file order."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


def plan_reads(header: Header, parts: Iterable[Part], *, gap: int, longest: int) -> tuple[Read, ...]:
    """The reads that cover the parts, in file order; no byte is read twice.

    Blocks with at most `gap` bytes between them share a read, of at most `longest` bytes unless one block is longer.
    """
    runs: list[list[Block]] = []
    for block in _blocks(header, parts):
        near = bool(runs) and block.start - runs[-1][-1].stop <= gap and block.stop - runs[-1][0].start <= longest
        if near:
            runs[-1].append(block)
        else:
            runs.append([block])
    return tuple(Read(run[0].start, run[-1].stop, tuple(run)) for run in runs)


def read_parts(source: Source, header: Header, wanted: Sequence[tuple[Part, memoryview]], threads: int) -> None:
    """Fill each memoryview with its part; only the blocks that cover the parts are checked.

    Memory: for each thread a buffer of one read, and what a block is decompressed to. Raises CorruptFile naming tensor and
    block; the memory may then hold some of the parts: drop it.
    """
    places: dict[tuple[str, int], list[tuple[Part, memoryview]]] = {}
    for part, out in wanted:
        assert 0 <= part.start <= part.stop <= part.info.size and len(out) == part.size
        for number in _numbers(header, part):
            places.setdefault((part.info.name, number), []).append((part, out))
    reads = plan_reads(header, (part for part, _ in wanted), gap=source.gap, longest=source.longest)
    run_all((partial(_read, source, header, read, places) for read in reads), min(threads, len(reads)))


def _read(
    source: Source, header: Header, read: Read, places: Mapping[tuple[str, int], Sequence[tuple[Part, memoryview]]]
) -> None:
    buffer = memoryview(bytearray(read.stop - read.start))
    source.read_into(read.start, buffer)
    for block in read.blocks:
        raw = check_block(header, block.info, block.number, buffer[block.start - read.start : block.stop - read.start])
        first = block.number * header.block_bytes
        for part, out in places[block.info.name, block.number]:
            low, high = max(part.start, first), min(part.stop, first + len(raw))
            out[low - part.start : high - part.start] = raw[low - first : high - first]


def _blocks(header: Header, parts: Iterable[Part]) -> Iterator[Block]:
    """Every block that covers some of the parts, once, in file order."""
    numbers: dict[str, set[int]] = {}
    infos: dict[str, TensorInfo] = {}
    for part in parts:
        infos[part.info.name] = part.info
        numbers.setdefault(part.info.name, set()).update(_numbers(header, part))
    for info in sorted(infos.values(), key=lambda info: info.start):
        for number in sorted(numbers[info.name]):
            yield Block(info, number, *block_place(header, info, number))


def _numbers(header: Header, part: Part) -> range:
    if part.start == part.stop:
        return range(0)
    return range(part.start // header.block_bytes, -(-part.stop // header.block_bytes))
