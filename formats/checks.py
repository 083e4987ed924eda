"""Checking a whole file without keeping its entries in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from formats import header as headers
from formats.blocks import read_blocks, run_all
from formats.entries import STORED_FIELDS
from formats.errors import naming
from formats.hashing import run_bytes, spans
from formats.header import Header
from formats.layout import TensorInfo
from formats.reader import read_index
from formats.source import Place, Source, open_source


@dataclass(frozen=True)
class VerifyReport:
    """What was found in order: the header, and every byte of `tensors` tensors in `blocks` blocks."""

    header: Header
    tensors: int
    blocks: int
    data_bytes: int


def verify_file(path: Place, *, threads: int = 4) -> VerifyReport:
    """Check header, structure, every hash, index tensor, code and grid; a file that passes is one that read_file accepts.

    Raises what read_file raises. Memory: the index tensors and `threads` buffers of at most 4 MiB.
    """
    with naming(path), open_source(path) as source:
        header = headers.parse(source)
        read_index(source, header, threads)
        infos = list(header.tensors.values())
        run_all((partial(_check_run, source, header, *run) for run in _runs(header, infos)), threads)
        blocks = sum(len(info.blocks) for info in infos)
        return VerifyReport(header, len(infos), blocks, sum(info.size for info in infos))


def _runs(header: Header, infos: list[TensorInfo]) -> Iterator[tuple[TensorInfo, int, int]]:
    for info in infos:
        if info.field in STORED_FIELDS:
            for low, high in spans(0, info.size, run_bytes(header.block_bytes)):
                yield info, low, high


def _check_run(source: Source, header: Header, info: TensorInfo, low: int, high: int) -> None:
    read_blocks(source, header, info, low, memoryview(bytearray(high - low)))
