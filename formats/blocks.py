"""Reading ranges of tensors, so that no byte is handed out whose block has not been checked.

A range may begin and end anywhere: whole blocks are read straight into their destination and hashed there
(or read, decompressed and hashed), the rest of
a block at either end passes through a buffer of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from formats import codecs, semantics
from formats.errors import CorruptFile
from formats.hashing import digest, spans
from formats.header import Header
from formats.layout import ITEM_BYTES, TensorInfo
from formats.source import Source


def read_blocks(source: Source, header: Header, info: TensorInfo, start: int, out: memoryview) -> None:
    """Fill `out` with whole blocks of a tensor from byte `start` (the begin of a block) on, and check them."""
    if not out:
        return
    blocks = list(spans(start, start + len(out), header.block_bytes))
    first, last = blocks[0][0] // header.block_bytes, blocks[-1][0] // header.block_bytes
    begin, end = block_place(header, info, first)[0], block_place(header, info, last)[1]
    stored = out if info.codec == "raw" else memoryview(bytearray(end - begin))
    source.read_into(begin, stored)
    for number, (low, high) in enumerate(blocks, first):
        place, stop = block_place(header, info, number)
        raw = check_block(header, info, number, stored[place - begin : stop - begin])
        if info.codec != "raw":
            out[low - start : high - start] = raw


def block_place(header: Header, info: TensorInfo, number: int) -> tuple[int, int]:
    """The file bytes [start, stop) in which a block of a tensor is stored."""
    start = header.data_start + info.start
    if info.codec != "raw":
        return start + info.places[number], start + info.places[number + 1]
    return start + number * header.block_bytes, min(
        start + (number + 1) * header.block_bytes, header.data_start + info.stop
    )


def check_block(header: Header, info: TensorInfo, number: int, stored: memoryview) -> memoryview:
    """The raw bytes of a block from its stored ones, with hashes compared and codes and grids looked at.

    Raises CorruptFile naming tensor and block.
    """
    start = number * header.block_bytes
    size = min(header.block_bytes, info.size - start)
    try:
        raw = stored
        if info.codec != "raw":
            # Before the decoder sees them: no changed byte gets that far, not even one that would change nothing.
            _compare(stored, info.stored[number])
            raw = codecs.decode(stored, size, ITEM_BYTES[info.dtype])
        _compare(raw, info.blocks[number])
    except CorruptFile as error:
        first, end = block_place(header, info, number)
        error.where = f"{info.name}, block {number} (file bytes {first}-{end - 1})"
        raise
    semantics.check_codes(info, start, raw)
    return raw


def _compare(data: memoryview, wanted: str) -> None:
    if digest(data) != wanted:
        raise CorruptFile("does not match its hash: a byte was changed")


def run_all(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Run the tasks on `threads` threads; raises the error of the first failing one in order and drops the rest."""
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="dropkv-read")
    try:
        for future in [pool.submit(task) for task in tasks]:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
