"""Every file that must be refused, as one list: a name, what makes the file from a good one, what the message says.

A new way to attack the format is one entry of CASES here, or of FORGED and RESPELLED in test_kv_hostile.py, or of OPENINGS
in test_kv_foreign.py; test_kv_refusals.py puts all of them through every reader and every command.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes

from tests.formats.conftest import Forgery
from tests.formats.test_kv_foreign import OPENINGS
from tests.formats.test_kv_hostile import FORGED, RESPELLED, put_index

Maker = Callable[[Path, Forgery], object]


@dataclass(frozen=True)
class Case:
    """`make` writes the file; `match` is in its message. whole: the header alone is good, so that only reading on refuses it."""

    make: Maker
    match: str
    whole: bool = False


def raw(data: bytes) -> Maker:
    """A file of these bytes."""
    return lambda path, good: path.write_bytes(data)


def changed(edit: Callable[[bytes], bytes]) -> Maker:
    """The good file's bytes, edited."""
    return lambda path, good: path.write_bytes(edit(good.bytes()))


def indexed(name: str, at: int, value: float) -> Maker:
    """One number of an index tensor replaced, all hashes right."""

    def make(path: Path, good: Forgery) -> None:
        put_index(good, name, at, value)
        good.rehash()
        good.write(path)

    return make


def json_header(text: str) -> Maker:
    """A file that is nothing but a safetensors header of this text."""
    padded = text.encode() + b" " * (-len(text) % 8)
    return raw(len(padded).to_bytes(8, "little") + padded)


def torch_file(*, old: bool) -> bytes:
    """What torch.save makes of a cache."""
    out = io.BytesIO()
    torch.save({"keys": torch.zeros(2, 3)}, out, _use_new_zipfile_serialization=not old)
    return out.getvalue()


def archive(**members: bytes) -> bytes:
    """A zip archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, data in members.items():
            made.writestr(name.replace("__", "/"), data)
    return out.getvalue()


def numpy_file(*, many: bool) -> bytes:
    """What NumPy saves arrays as."""
    out = io.BytesIO()
    if many:
        np.savez(out, keys=np.zeros(3), values=np.ones(3))
    else:
        np.save(out, np.zeros(3))
    return out.getvalue()


def safetensors(names: list[str], **metadata: str) -> bytes:
    """A safetensors file of one small tensor for each name."""
    return safetensors_bytes({name: torch.zeros(2) for name in names}, metadata or None)


def sparse(path: Path, good: Forgery) -> None:
    """A header whose counts fit a file of 3 GiB, and such a file, of holes: one wrong hash is all that stands against it."""
    layer = good.about["layers"][0]
    entries = (3 << 30) // 64
    layer.update(entries=entries, d_k=8, d_v=8)
    good.about.update(layers=[layer], block_bytes=4 << 20)
    good.about["document"].update(tokens=entries, whole_tokens=entries)
    start, table, rows = 0, {}, {}
    shapes = [("tokens", [entries], 4, "I32"), ("layers.0.offsets", [4], 4, "I32")]
    shapes += [(f"layers.0.{name}", [entries], 4, "I32") for name in ("positions", "admit")]
    shapes += [("layers.0.scores", [entries], 4, "F32")]
    shapes += [(f"layers.0.{name}", [entries, 8], 16, "BF16") for name in ("keys", "values")]
    for name, shape, row_bytes, dtype in shapes:
        size = shape[0] * row_bytes
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        rows[name] = {"codec": "raw", "sizes": None, "blocks": ["0" * 32] * -(-size // (4 << 20))}
        start += size
    good.table, good.about["tensors"], good.data = table, rows, bytearray()
    good.write(path)
    os.truncate(path, path.stat().st_size + start)


def link_loop(path: Path, good: Forgery) -> None:
    """A symbolic link to itself."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def pipe(path: Path, good: Forgery) -> None:
    """A named pipe that nobody writes to."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path, good: Forgery) -> None:
    """A folder."""
    path.unlink(missing_ok=True)
    path.mkdir()


def missing(path: Path, good: Forgery) -> None:
    """Nothing at all."""
    path.unlink(missing_ok=True)


CROWD = 1_000_000  # characters of a header that one small file may have

CASES: dict[str, Case] = {
    "no file": Case(missing, "no such file; check the name"),
    "folder": Case(folder, "is a folder, not a file"),
    "pipe": Case(pipe, "is a pipe, not a file"),
    "link to itself": Case(link_loop, "cannot be opened: Too many levels"),
    "cut in the header": Case(changed(lambda data: data[:1000]), "file bytes 0-7: .*ends after 1000"),
    "cut in the data": Case(changed(lambda data: data[:-1]), r"layers\.2\.values: the file ends after"),
    "byte appended": Case(changed(lambda data: data + b"\0"), "1 bytes follow the last tensor"),
    "last bit": Case(changed(lambda data: data[:-1] + bytes([data[-1] ^ 1])), r"layers\.2\.values, block 0", True),
    "header length": Case(changed(lambda data: b"\xff" * 8 + data[8:]), "file bytes 0-7: the header takes"),
    "unknown version": Case(
        lambda path, good: (good.about.update(format_version=9, oldest_reader=9), good.write(path)),
        "version 9 and needs a reader of version 9 or newer.*pip install -U dropkv",
    ),
    "older version": Case(
        lambda path, good: (good.about.update(format_version=0, oldest_reader=0), good.write(path)),
        "format_version and oldest_reader are no pair of versions",
    ),
    "no hash at all": Case(
        lambda path, good: good.write(path, outer=lambda text: text.replace(',\\"hash\\":', ',\\"hush\\":')),
        "does not match its own hash",
    ),
    "negative token": Case(indexed("tokens", 4, -1), "tokens, element 4: is -1", True),
    "offsets that fall": Case(indexed("layers.1.offsets", 1, 15), r"layers\.1\.offsets, head 1: fall from 15", True),
    "negative offset": Case(indexed("layers.0.offsets", 1, -5), r"layers\.0\.offsets, head 0: fall", True),
    "offset past the end": Case(indexed("layers.0.offsets", 3, 2**31 - 1), "not from 0 to the 14 entries", True),
    "position beyond": Case(indexed("layers.0.positions", 6, 40), r"layers\.0\.positions, head 1, entry 1", True),
    "admit beyond": Case(indexed("layers.0.admit", 13, 13), r"layers\.0\.admit, head 1, entry 8: is 13", True),
    "score not a number": Case(indexed("layers.1.scores", 20, float("nan")), r"layers\.1\.scores.*is nan", True),
    "lists": Case(json_header('{"a":[' + ",".join(["[]"] * (CROWD // 3)) + "]}"), "more than .* values"),
    "objects": Case(json_header('{"a":[' + ",".join(['{"":{}}'] * (CROWD // 8)) + "]}"), "more than .* values"),
    "texts": Case(json_header('{"a":[' + ",".join(['"ab"'] * (CROWD // 5)) + "]}"), "more than .* values"),
    "as many objects as pass": Case(
        json_header('{"a":[' + ",".join(['{"":{}}' + " " * 16] * (CROWD // 24)) + "]}"), "without a dropkv entry"
    ),
    "all brackets": Case(json_header('{"a":' + "[" * CROWD), "more than .* values"),
    "one long text": Case(json_header('{"a":"' + "x" * CROWD + '"}'), "without a dropkv entry"),
    "one long name": Case(json_header('{"' + "[" * CROWD + '":0}'), "without a dropkv entry"),
    "one long number": Case(json_header('{"a":' + "9" * CROWD + "}"), "out of range"),
    "3 GiB of holes": Case(sparse, "tokens, block 0 .*does not match its hash", True),
    "torch file": Case(raw(torch_file(old=False)), r"is a torch \.pt file \(a zip.*never opened.*dropkv compress"),
    "old torch file": Case(raw(torch_file(old=True)), r"is a torch \.pt file \(an old one.*never opened"),
    "pickle of protocol 5": Case(raw(pickle.dumps([1, 2, "three"] * 9, 5)), "is a Python pickle.*never opened"),
    "zip": Case(raw(archive(a=b"text")), "is a zip archive; unpack it first"),
    "office document": Case(raw(archive(word__document=b"")), "is an office document; save it as plain text"),
    "npz": Case(raw(numpy_file(many=True)), r"is a NumPy \.npz archive"),
    "npy": Case(raw(numpy_file(many=False)), r"is a NumPy \.npy file"),
    "tar": Case(raw(b"a.kv".ljust(257, b"\0") + b"ustar\0" + bytes(300)), "is a tar archive"),
    "ggjt": Case(raw((0x67676A74).to_bytes(4, "little") + bytes(60)), "format from before GGUF"),
    "ggla": Case(raw((0x67676C61).to_bytes(4, "little") + bytes(60)), r"llama\.cpp LoRA adapter"),
    "mlx-lm cache": Case(
        raw(safetensors(["0.0", "0.1", "1.0", "1.1"], **{"0.0": "", "1.model": "mlx/a\n", "2.0": "KVCache"})),
        r'is an mlx-lm prompt cache of "mlx/a\\n"; use it with `mlx_lm\.generate --prompt-cache-file`; compress',
    ),
    "mlx-lm quantised cache": Case(
        raw(safetensors(["0.0.0", "0.0.1", "0.1.0"], **{"2.0": "QuantizedKVCache"})), "is an mlx-lm prompt cache;"
    ),
    "mlx-lm cache without classes": Case(raw(safetensors(["0.0", "0.1"])), "is an mlx-lm prompt cache;"),
    "cache chunk": Case(raw(safetensors(["kv_chunk"])), "is a cache chunk of LMCache or vLLM"),
    "LoRA": Case(raw(safetensors(["base_model.model.layers.0.q_proj.lora_A.weight"])), "is a LoRA adapter"),
    "weights": Case(raw(safetensors(["model.embed_tokens.weight"], format="pt")), "holds model weights.*--model"),
    "weights cut off": Case(raw(safetensors(["model.embed_tokens.weight"])[:40]), "safetensors file that was cut off"),
}


def _forged(edit: Callable[[Forgery], object]) -> Maker:
    def make(path: Path, good: Forgery) -> None:
        edit(good)
        good.write(path)

    return make


def _respelled(inner: Callable[[str], str], outer: Callable[[str], str]) -> Maker:
    return lambda path, good: good.write(path, inner=inner, outer=outer)


CASES |= {f"forged: {name}": Case(_forged(edit), match) for name, (edit, match) in FORGED.items()}
CASES |= {f"spelt: {name}": Case(_respelled(inner, outer), match) for name, (inner, outer, match) in RESPELLED.items()}
CASES |= {f"opening: {name}": Case(raw(data), match) for name, (data, match) in OPENINGS.items()}
