"""Reading ranges of tensors, so that no byte is handed out whose block has not been checked.

A range may begin and end anywhere: whole blocks are read straight into their destination and hashed there
(or read, decompressed and hashed), the rest of
a block at either end passes through a buffer of one block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from formats import codecs, semantics
from formats.errors import CorruptFile
from formats.hashing import digest, spans
from formats.header import Header
from formats.layout import ITEM_BYTES, TensorInfo
from formats.source import Source

CHANGED = "does not match its hash: a byte was changed"


def read_blocks(source: Source, header: Header, info: TensorInfo, start: int, out: memoryview) -> None:
    """Fill `out` with whole blocks of a tensor from byte `start` (the begin of a block) on, and check them."""
    if not out:
        return
    blocks = list(spans(start, start + len(out), header.block_bytes))
    first, last = blocks[0][0] // header.block_bytes, blocks[-1][0] // header.block_bytes
    begin, end = block_place(header, info, first)[0], block_place(header, info, last)[1]
    stored = out if info.codec == "raw" else memoryview(bytearray(end - begin))
    source.read_into(begin, stored)
    if info.codec == "raw":
        check_blocks(header, info, first, last + 1, stored)
        return
    for number, (low, high) in enumerate(blocks, first):
        place, stop = block_place(header, info, number)
        out[low - start : high - start] = check_block(header, info, number, stored[place - begin : stop - begin])


def block_place(header: Header, info: TensorInfo, number: int) -> tuple[int, int]:
    """The file bytes [start, stop) in which a block of a tensor is stored."""
    start = header.data_start + info.start
    if info.codec != "raw":
        return start + info.places[number], start + info.places[number + 1]
    return start + number * header.block_bytes, min(
        start + (number + 1) * header.block_bytes, header.data_start + info.stop
    )


def blocks_before(header: Header, info: TensorInfo, limit: int, last: int) -> int:
    """How many of a tensor's first `last` blocks end at or before a byte of the file."""
    room = limit - header.data_start - info.start
    if info.codec != "raw":
        return min(last, max(0, bisect_right(info.places, room) - 1))
    return last if room >= info.size else min(last, max(0, room // header.block_bytes))


def check_blocks(header: Header, info: TensorInfo, first: int, last: int, stored: memoryview) -> None:
    """Blocks [first, last) of a raw tensor, end to end: hashes compared, codes and grids looked at.

    As `check_block` for each of them, in one go: there are thousands, and what is done for each keeps other threads waiting.
    """
    step = header.block_bytes
    found = [digest(stored[at : at + step]) for at in range(0, len(stored), step)]
    wanted = info.blocks[first:last]
    if tuple(found) != wanted:
        number = first + next(at for at, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
        raise CorruptFile(CHANGED, where=_where(header, info, number))
    if semantics.has_codes(info):
        for at in range(0, len(stored), step):
            semantics.check_codes(info, first * step + at, stored[at : at + step])


def check_block(header: Header, info: TensorInfo, number: int, stored: memoryview) -> memoryview:
    """The raw bytes of a compressed block from its stored ones, with hashes compared and codes and grids looked at.

    Raises CorruptFile naming tensor and block.
    """
    start = number * header.block_bytes
    size = min(header.block_bytes, info.size - start)
    try:
        # Before the decoder sees them: no changed byte gets that far, not even one that would change nothing.
        _compare(stored, info.stored[number])
        raw = codecs.decode(stored, size, ITEM_BYTES[info.dtype])
        _compare(raw, info.blocks[number])
    except CorruptFile as error:
        error.where = _where(header, info, number)
        raise
    semantics.check_codes(info, start, raw)
    return raw


def _compare(data: memoryview, wanted: str) -> None:
    if digest(data) != wanted:
        raise CorruptFile(CHANGED)


def _where(header: Header, info: TensorInfo, number: int) -> str:
    first, end = block_place(header, info, number)
    return f"{info.name}, block {number} (file bytes {first}-{end - 1})"


def run_all(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Run the tasks on `threads` threads; raises the error of the first failing one in order and drops the rest."""
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="dropkv-read")
    try:
        for future in [pool.submit(task) for task in tasks]:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
