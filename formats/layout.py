"""Which tensors a KV file holds, in which order, with which shapes: all of it follows from the metadata.

The small tensors (4 bytes an element) of all layers come first, then keys and values layer by layer, so that everything
needed to choose entries is one range at the front of the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from formats.metadata import Metadata

MAX_BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 4 << 10
DEFAULT_BLOCK_BYTES = 256 << 10  # small, so that a smaller budget can be read without reading whole tensors
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself

CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int32": "I32"}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file: `start` and `stop` in bytes from the start of the data, `blocks` the hash of each block.

    `dtype` is torch's name for it ("int32", "bfloat16", ...); in the file it stands as safetensors' code.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    codec: str = "raw"
    blocks: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def table_entry(self) -> dict[str, object]:
        """The tensor's entry in the safetensors header."""
        return {"dtype": CODES[self.dtype], "shape": list(self.shape), "data_offsets": [self.start, self.stop]}


def plan(metadata: Metadata, with_tokens: bool) -> tuple[TensorInfo, ...]:
    """Every tensor of a file with this metadata, in file order, without hashes."""
    infos: list[TensorInfo] = []
    start = 0
    for name, dtype, shape in _shapes(metadata, with_tokens):
        stop = start + math.prod(shape) * ITEM_BYTES[dtype]
        infos.append(TensorInfo(name, dtype, shape, start, stop))
        start = stop
    return tuple(infos)


def _shapes(metadata: Metadata, with_tokens: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    if with_tokens:
        yield "tokens", "int32", (metadata.document.tokens,)
    for index, layer in enumerate(metadata.layers):
        yield f"layers.{index}.offsets", "int32", (layer.kv_heads + 1,)
        yield f"layers.{index}.positions", "int32", (layer.entries,)
        yield f"layers.{index}.admit", "int32", (layer.entries,)
        yield f"layers.{index}.scores", "float32", (layer.entries,)
    for index, layer in enumerate(metadata.layers):
        yield f"layers.{index}.keys", metadata.dtype, (layer.entries, layer.d_k)
        yield f"layers.{index}.values", metadata.dtype, (layer.entries, layer.d_v)


def block_count(size: int, block_bytes: int) -> int:
    """Blocks of a tensor of `size` bytes; an empty tensor has none."""
    return -(-size // block_bytes)


def header_limit(file_bytes: int) -> int:
    """The longest header a file of this size may have: generous for a real one, tight for a hostile one.

    Hashes of the smallest blocks take 1/110 of the data; parsing JSON costs up to 20 times its length in memory.
    """
    return min(MAX_HEADER_BYTES, (4 << 20) + file_bytes // 64)
