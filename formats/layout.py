"""Which tensors a KV file holds, in which order, with which shapes: all of it follows from the metadata.

The small tensors (4 bytes an element) of all layers come first, then the grids of quantised entries, then keys and values
layer by layer, so that everything needed to choose entries is one range at the front of the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from formats.grids import KINDS
from formats.metadata import Metadata

MAX_BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 4 << 10
DEFAULT_BLOCK_BYTES = 64 << 10  # small, so that a smaller budget can be read without reading whole heads
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself

CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int32": "I32"} | {
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "uint8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file: it is stored at `start` to `stop`, in bytes from the start of the data.

    `dtype` is torch's name for it ("int32", "bfloat16", ...); in the file it stands as safetensors' code. `blocks` is the
    hash of each block's raw bytes. With the codec "zstd", `sizes` is the stored length of each block and `stored` the hash
    of what is stored of it. spare: the last byte of every row holds one code of four bits and four bits that are zero.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    codec: str = "raw"
    blocks: tuple[str, ...] = ()
    sizes: tuple[int, ...] | None = None
    stored: tuple[str, ...] = ()
    spare: bool = False

    @property
    def size(self) -> int:
        """Raw bytes: those of the tensor itself, whatever the codec."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def field(self) -> str:
        """The last part of the name: "keys", "positions", "tokens", ..."""
        return self.name.rpartition(".")[2]

    @property
    def layer(self) -> int:
        """The layer it belongs to; not for "tokens"."""
        return int(self.name.split(".")[1])

    @cached_property
    def places(self) -> tuple[int, ...]:
        """With the codec "zstd": where each block starts, in bytes from `start`, and where the last one ends."""
        return tuple(accumulate(self.sizes or (), initial=0))

    def table_entry(self) -> dict[str, object]:
        """The tensor's entry in the safetensors header; compressed ones are plain bytes there."""
        if self.codec == "raw":
            return {"dtype": CODES[self.dtype], "shape": list(self.shape), "data_offsets": [self.start, self.stop]}
        return {"dtype": "U8", "shape": [self.stop - self.start], "data_offsets": [self.start, self.stop]}


def plan(metadata: Metadata, with_tokens: bool) -> tuple[TensorInfo, ...]:
    """Every tensor of a file with this metadata, in file order, stored raw, without hashes."""
    return place(_tensors(metadata, with_tokens))


def place(infos: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """The tensors end to end, each as long as its codec makes it."""
    placed: list[TensorInfo] = []
    start = 0
    for info in infos:
        stop = start + (info.size if info.sizes is None else sum(info.sizes))
        placed.append(replace(info, start=start, stop=stop))
        start = stop
    return tuple(placed)


def _tensors(metadata: Metadata, with_tokens: bool) -> Iterator[TensorInfo]:
    def tensor(name: str, dtype: str, *shape: int, spare: bool = False) -> TensorInfo:
        return TensorInfo(name, dtype, shape, 0, 0, spare=spare)

    if with_tokens:
        yield tensor("tokens", "int32", metadata.document.tokens)
    for index, layer in enumerate(metadata.layers):
        yield tensor(f"layers.{index}.offsets", "int32", layer.kv_heads + 1)
        yield tensor(f"layers.{index}.positions", "int32", layer.entries)
        yield tensor(f"layers.{index}.admit", "int32", layer.entries)
        yield tensor(f"layers.{index}.scores", "float32", layer.entries)
    quantization = metadata.quantization
    if quantization is None:
        for index, layer in enumerate(metadata.layers):
            yield tensor(f"layers.{index}.keys", metadata.dtype, layer.entries, layer.d_k)
            yield tensor(f"layers.{index}.values", metadata.dtype, layer.entries, layer.d_v)
        return
    kind = KINDS[quantization.kind]
    for index, layer in enumerate(metadata.layers):
        by_group = (quantization.key_groups[index], layer.d_k)
        by_entry = (layer.entries, -(-layer.d_v // quantization.value_group))
        for field, shape in (("key", by_group), ("value", by_entry)):
            yield tensor(f"layers.{index}.{field}_scales", "bfloat16", *shape)
            if kind.zeros:
                yield tensor(f"layers.{index}.{field}_zeros", "bfloat16", *shape)
    for index, layer in enumerate(metadata.layers):
        for field, channels in (("keys", layer.d_k), ("values", layer.d_v)):
            spare = kind.packed and channels % 2 == 1
            yield tensor(f"layers.{index}.{field}", kind.codes, layer.entries, kind.width(channels), spare=spare)


def block_count(size: int, block_bytes: int) -> int:
    """Blocks of a tensor of `size` bytes; an empty tensor has none."""
    return -(-size // block_bytes)


def header_limit(file_bytes: int) -> int:
    """The longest header a file of this size may have: generous for a real one, tight for a hostile one.

    Hashes of the smallest blocks take 1/110 of the data; parsing JSON costs up to 20 times its length in memory.
    """
    return min(MAX_HEADER_BYTES, (4 << 20) + file_bytes // 64)
