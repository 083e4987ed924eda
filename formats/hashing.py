"""Block hashes: xxh3-128 as 32 lower-case hexadecimal digits over each block of raw bytes."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from formats.layout import MAX_BLOCK_BYTES

DIGITS = 32


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 of the bytes, big-endian hexadecimal (xxhash's canonical form); releases the interpreter lock from about 100,000 bytes on."""
    return xxhash.xxh3_128_hexdigest(data)


def spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) at every multiple of `step`."""
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


def run_bytes(block_bytes: int) -> int:
    """Bytes moved by one read or write: the most whole blocks that fit in 4 MiB."""
    return MAX_BLOCK_BYTES // block_bytes * block_bytes
