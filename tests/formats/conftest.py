"""Small KV files to read, damage and forge; the forger spells and hashes a header by itself, from FORMAT.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from formats import (
    BudgetInfo,
    DocumentInfo,
    LayerEntries,
    LayerInfo,
    Metadata,
    ModelIdentity,
    TokenizerIdentity,
    write_file,
)


@dataclass(frozen=True, eq=False)
class Sample:
    metadata: Metadata
    layers: list[LayerEntries]
    tokens: torch.Tensor | None

    def write(self, path: Path, **options: Any) -> int:
        return write_file(path, self.metadata, self.layers, self.tokens, **options)


def build_sample(
    dtype: str = "bfloat16",
    *,
    n: int = 40,
    d_k: int = 6,
    d_v: int = 10,
    counts: tuple[tuple[int, ...], ...] = ((5, 9, 0), (7, 7, 7)),
    sliding: bool = True,
    with_tokens: bool = True,
    seed: int = 0,
) -> Sample:
    """Random entries; `counts` gives the entries of each head of each full layer, then follows a sliding layer."""
    generator = torch.Generator().manual_seed(seed)
    kinds: list[tuple[str, tuple[int, ...]]] = [("full", heads) for heads in counts]
    if sliding:
        kinds.append(("sliding", (8, 8, 8)))
    infos, layers = [], []
    for kind, heads in kinds:
        entries = sum(heads)
        infos.append(
            LayerInfo(kind, 2 * len(heads), len(heads), d_k, d_v, None if kind == "full" else 8, entries)  # type: ignore[arg-type]
        )
        full = kind == "full"
        positions = [torch.randperm(n, generator=generator)[:k] if full else torch.arange(n - k, n) for k in heads]
        admit = [torch.randint(1, 13, (k,), generator=generator).sort().values * int(full) for k in heads]
        layers.append(
            LayerEntries(
                keys=torch.randn(entries, d_k, generator=generator).to(getattr(torch, dtype)),
                values=torch.randn(entries, d_v, generator=generator).to(getattr(torch, dtype)),
                offsets=torch.tensor([0, *torch.tensor(heads).cumsum(0).tolist()], dtype=torch.int32),
                positions=torch.cat(positions).int(),
                admit=torch.cat(admit).int(),
                scores=torch.rand(entries, generator=generator),
            )
        )
    metadata = Metadata(
        writer="dropkv 0.1.0",
        model=ModelIdentity(
            "tiny", "folder", None, "LlamaForCausalLM", {"b": [1, 2.5, None], "a": {"z": 1, "y": True}}, "c0", {}
        ),
        tokenizer=TokenizerIdentity("f0", "t0", {"enable_thinking": False}, None),
        document=DocumentInfo('süß "quoted" \\ 文.txt', "ab" * 32, n, 3, n + 7),
        method={"name": "adadropkv", "pool": 7},
        observer={"name": "replay", "chunk": 512},
        budget=BudgetInfo(0.3, 12, "head-adaptive", 0.2, 0, 0, True),
        layers=tuple(infos),
        dtype=dtype,
        rope={"kind": "default", "theta": 10000.0},
        fidelity=None,
    )
    tokens = torch.randint(0, 50000, (n,), generator=generator).int() if with_tokens else None
    return Sample(metadata, layers, tokens)


Edit = Callable[[dict[str, Any]], None]


@dataclass
class Forgery:
    """A KV file taken apart: the dropkv object without its hash, the tensor table, the bytes of the tensors."""

    about: dict[str, Any]
    table: dict[str, Any]
    data: bytearray

    @classmethod
    def of(cls, path: Path) -> Forgery:
        return cls.from_bytes(path.read_bytes())

    @classmethod
    def from_bytes(cls, raw: bytes) -> Forgery:
        size = int.from_bytes(raw[:8], "little")
        table = json.loads(raw[8 : 8 + size])
        about = json.loads(table.pop("__metadata__")["dropkv"])
        del about["hash"]
        return cls(about, table, bytearray(raw[8 + size :]))

    def span(self, name: str) -> slice:
        return slice(*self.table[name]["data_offsets"])

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a tensor's bytes by those of a tensor of the same size."""
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert len(data) == len(self.data[self.span(name)])
        self.data[self.span(name)] = data

    def rehash(self) -> None:
        """Make every block hash right for the bytes as they are."""
        step = self.about["block_bytes"]
        for name, row in self.about["tensors"].items():
            data = bytes(self.data[self.span(name)])
            row["blocks"] = [
                xxhash.xxh3_128_hexdigest(data[start : start + step]) for start in range(0, len(data), step)
            ]

    def bytes(self, *, inner: Callable[[str], str] = str, outer: Callable[[str], str] = str) -> bytes:
        """The file with a right header hash; `inner` and `outer` edit the two JSON texts on their way."""
        spell = {"separators": (",", ":")}
        body = inner(json.dumps(self.about, **spell))[:-1]  # type: ignore[arg-type]
        digest = xxhash.xxh3_128_hexdigest(f"{body}\n{json.dumps(self.table, **spell)}".encode())  # type: ignore[arg-type]
        text = json.dumps(
            {"__metadata__": {"format": "pt", "dropkv": f'{body},"hash":"{digest}"}}'}, **self.table},
            **spell,  # type: ignore[arg-type]
        )
        text = outer(text)
        text += " " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text.encode() + bytes(self.data)

    def write(self, path: Path, **edits: Any) -> Path:
        path.write_bytes(self.bytes(**edits))
        return path


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return build_sample


@pytest.fixture
def sample() -> Sample:
    return build_sample()


@pytest.fixture
def kv(tmp_path: Path, sample: Sample) -> Path:
    """A good file, `book.kv`."""
    path = tmp_path / "book.kv"
    sample.write(path)
    return path


@pytest.fixture
def forgery(kv: Path) -> Forgery:
    return Forgery.of(kv)


@pytest.fixture
def with_metadata() -> Callable[..., Sample]:
    """A sample whose metadata has some fields replaced."""

    def change(sample: Sample, **fields: Any) -> Sample:
        return replace(sample, metadata=replace(sample.metadata, **fields))

    return change
