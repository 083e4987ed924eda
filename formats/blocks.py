"""Reading ranges of tensors, so that no byte is handed out whose block has not been checked.

A range may begin and end anywhere: whole blocks are read straight into their destination and hashed there, the rest of
a block at either end passes through a buffer of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from formats.errors import CorruptFile
from formats.hashing import digest, run_bytes, spans
from formats.header import Header
from formats.layout import TensorInfo
from formats.source import Source


def read_range(source: Source, header: Header, info: TensorInfo, start: int, stop: int, out: memoryview) -> None:
    """Fill `out` with bytes [start, stop) of a tensor; reads and checks only the blocks that cover them.

    Raises CorruptFile naming tensor and block. `out` may then hold unchecked bytes: drop it.
    """
    assert 0 <= start <= stop <= info.size and len(out) == stop - start
    step = header.block_bytes
    whole_start, whole_stop = -(-start // step) * step, stop if stop == info.size else stop // step * step
    if whole_start >= whole_stop:  # nothing but ends
        whole_start = whole_stop = stop
    for low, high in spans(start, whole_start, step):
        _read_part(source, header, info, low, high, out[low - start : high - start])
    for low, high in spans(whole_start, whole_stop, run_bytes(step)):
        read_blocks(source, header, info, low, out[low - start : high - start])
    for low, high in spans(whole_stop, stop, step):
        _read_part(source, header, info, low, high, out[low - start : high - start])


def read_blocks(source: Source, header: Header, info: TensorInfo, start: int, out: memoryview) -> None:
    """Fill `out` with whole blocks of a tensor from byte `start` (the begin of a block) on, and check their hashes."""
    source.read_into(header.data_start + info.start + start, out)
    for low, high in spans(start, start + len(out), header.block_bytes):
        check_block(header, info, low // header.block_bytes, out[low - start : high - start])


def block_place(header: Header, info: TensorInfo, number: int) -> tuple[int, int]:
    """The file bytes [start, stop) in which a block of a tensor is stored."""
    start = header.data_start + info.start + number * header.block_bytes
    return start, min(start + header.block_bytes, header.data_start + info.stop)


def check_block(header: Header, info: TensorInfo, number: int, stored: memoryview) -> memoryview:
    """The raw bytes of a block from its stored ones; CorruptFile, naming tensor and block, when its hash says otherwise."""
    if digest(stored) != info.blocks[number]:
        first, end = block_place(header, info, number)
        raise CorruptFile(
            "does not match its hash: a byte was changed",
            where=f"{info.name}, block {number} (file bytes {first}-{end - 1})",
        )
    return stored


def _read_part(source: Source, header: Header, info: TensorInfo, low: int, high: int, out: memoryview) -> None:
    begin = low // header.block_bytes * header.block_bytes
    block = memoryview(bytearray(min(header.block_bytes, info.size - begin)))
    read_blocks(source, header, info, begin, block)
    out[:] = block[low - begin : high - begin]


def run_all(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Run the tasks on `threads` threads; raises the error of the first failing one in order and drops the rest."""
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="dropkv-read")
    try:
        for future in [pool.submit(task) for task in tasks]:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
