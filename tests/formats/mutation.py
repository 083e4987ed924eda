"""Mutants of good KV files: of their bytes, and of what the bytes say, with all hashes made right again afterwards.

Number i of a seed is always the same mutant, so that a failure is reproduced by two numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from formats.quantized import describe, quantize
from tests.formats.conftest import Forgery, Sample, build_sample

WORDS = (
    "", "x", "raw", "zstd", "BF16", "F64", "I32", "full", "sliding", "float16", "hub", "\0", "\n", "\u00e9", "\ud800",
    "a" * 70, "0" * 32, "tokens", "layers.0.keys", "__metadata__", "dropkv", "hash",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 64, 4096, 8192, 1 << 22, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    1 << 64, -(1 << 63), 0.0, -0.0, 0.5, 1.0, 1.5, 1e308, 5e-324, float("nan"), float("inf"),
)  # fmt: skip
LEVEL = 3  # of the compressed files
ITEMS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4}
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
LITTLE = (
    b"\0",
    b"\xff",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\0\0\xc0\x7f",
    b'"',
    b"{",
    b"[",
)


@dataclass(frozen=True)
class Mutant:
    """`data` made from `base` in the manner of `kind`. Hashes of "bytes" are as they were; all others have right ones."""

    kind: str
    data: bytes
    base: bytes


def corpus(folder: Path) -> list[bytes]:
    """Small good files that differ in what they have: tokens, sliding layers, types, codes, zstd, several blocks in a tensor."""
    small = dict(n=12, d_k=2, d_v=3, counts=((3, 2),))
    samples = (
        build_sample(**small, sliding=False),
        build_sample("float32", **small, with_tokens=False, seed=1),
        build_sample("float16", n=20, d_k=1, d_v=1, counts=((0, 0), (5, 4)), sliding=False, seed=2),
        build_sample("float64", n=30, d_k=40, d_v=20, counts=((20, 11),), sliding=False, seed=3),
    )
    found = []
    compressible = build_sample(n=300, d_k=16, d_v=8, counts=((300, 200),), sliding=False, seed=4)
    compressible.layers[0].keys[:] = 0
    kinds = ("int8", "int4", "fp8")
    coded = [(quantised(build_sample("float32", **small, sliding=False, seed=5), kind), None) for kind in kinds]
    coded += [(compressible, LEVEL), (quantised(compressible, "int4"), LEVEL)]
    for number, (sample, level) in enumerate([*((sample, None) for sample in samples), *coded]):
        path = folder / f"corpus{number}.kv"
        sample.write(path, overwrite=True, block_bytes=4096, zstd=level)
        found.append(path.read_bytes())
    return found


def quantised(sample: Sample, kind: str) -> Sample:
    """The sample with its entries stored as codes."""
    about = describe(kind, [layer.offsets.tolist() for layer in sample.layers])
    metadata = replace(sample.metadata, quantization=about)
    return Sample(metadata, [quantize(layer, about) for layer in sample.layers], sample.tokens)


def is_raw(data: bytes) -> bool:
    """Whether no tensor is compressed, so that numbers can be changed in place."""
    return b'\\"codec\\":\\"zstd\\"' not in data


def is_compressed(data: bytes) -> bool:
    """Whether some tensor is."""
    return not is_raw(data)


def is_plain(data: bytes) -> bool:
    """Whether entries are stored as they are, neither quantised nor compressed."""
    return is_raw(data) and b'\\"quantization\\":null' in data


def mutant(bases: list[bytes], seed: int, number: int) -> Mutant:
    """Mutant `number` of this seed."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    base = rng.choice([base for base in bases if NEEDS.get(kind, bool)(base)])
    return Mutant(kind, KINDS[kind][1](rng, base, bases), base)


def of_bytes(rng: random.Random, base: bytes, bases: list[bytes]) -> bytes:
    """A few bytes flipped, set, put in, taken out, doubled, moved or taken from another file."""
    data = bytearray(base)
    head = 8 + int.from_bytes(base[:8], "little")
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.choice((rng.randrange(16), rng.randrange(8, head), rng.randrange(head, len(base))))
        at, length = min(at, len(data)), rng.choice((1, 1, 2, 4, 8, rng.randrange(1, 200)))
        match rng.randrange(9):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                little = rng.choice(LITTLE)
                data[at : at + len(little)] = little
            case 3:
                data[at:at] = rng.randbytes(length)
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length]
            case 6:
                del data[at:]
            case 7:
                other = rng.choice(bases)
                data[at : at + length] = other[at : at + length]
            case _:
                data += rng.randbytes(length)
    return bytes(data)


def of_numbers(rng: random.Random, base: bytes, bases: list[bytes]) -> bytes:
    """Some numbers of the tensors replaced, the structure kept."""
    forged = Forgery.from_bytes(base)
    _change_numbers(rng, forged)
    forged.rehash()
    return forged.bytes()


def of_structure(rng: random.Random, base: bytes, bases: list[bytes]) -> bytes:
    """The header's JSON changed anywhere."""
    forged = Forgery.from_bytes(base)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change_tree(rng, forged.about if rng.random() < 0.7 else forged.table)
    if rng.random() < 0.3:
        _change_numbers(rng, forged)
        _try(forged.rehash)
    return forged.bytes()


def of_shapes(rng: random.Random, base: bytes, bases: list[bytes]) -> bytes:
    """Counts changed, and tensor table, rows and data made to fit them."""
    forged = Forgery.from_bytes(base)
    about = forged.about
    for _ in range(rng.choice((0, 1, 1, 2))):
        target: Any = rng.choice([about["document"], about["budget"], about, *about["layers"], *about["layers"]])
        key = rng.choice([key for key, value in target.items() if type(value) in (int, str, float)])
        if type(target[key]) is str:
            target[key] = rng.choice(("float16", "float32", "bfloat16", "full", "sliding", *WORDS))
        else:
            target[key] = rng.choice((target[key] + 1, target[key] - 1, 0, 1, 2, 8, 40, 4096, 8192))
    if rng.random() < 0.2:
        about["layers"] = rng.choices(about["layers"], k=rng.randrange(4))
    if rng.random() < 0.2:
        about["layers"] and about["layers"][0].update(kind="sliding", window=4)
    _try(lambda: _fit(rng, forged, with_tokens=rng.random() < 0.7))
    return forged.bytes()


def of_text(rng: random.Random, base: bytes, bases: list[bytes]) -> bytes:
    """One of the two JSON texts edited as text: other spellings, repeated keys, things that are no JSON."""
    forged = Forgery.from_bytes(base)
    return forged.bytes(**{rng.choice(("inner", "outer")): lambda text: _edited(rng, text)})


def of_frames(rng: random.Random, base: bytes, bases: list[bytes]) -> bytes:
    """One zstd frame changed, hashes of what is stored and all places made right; those of raw bytes are as they were."""
    forged = Forgery.from_bytes(base)
    name, row = rng.choice([item for item in forged.about["tensors"].items() if item[1]["sizes"]])
    number = rng.randrange(len(row["sizes"]))
    start = forged.span(name).start + sum(row["sizes"][:number])
    old = bytes(forged.data[start : start + row["sizes"][number]])
    frame = bytearray(old)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.choice((rng.randrange(len(frame)), min(rng.randrange(14), len(frame) - 1)))  # the frame's own header
        match rng.randrange(6):
            case 0 | 1 | 2:
                frame[at] ^= 1 << rng.randrange(8)
            case 3:
                frame[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
            case 4 if len(frame) > 2:
                del frame[at : at + rng.choice((1, 4, len(frame) - at - 1))]
            case _:
                frame += rng.choice((old, b"\0", rng.randbytes(8)))
        frame = frame or bytearray(1)
    row["sizes"][number], row["stored"][number] = len(frame), xxhash.xxh3_128_hexdigest(bytes(frame))
    forged.data[start : start + len(old)] = frame
    at = 0
    for other, entry in forged.table.items():
        low, high = entry["data_offsets"]
        size = high - low + (len(frame) - len(old) if other == name else 0)
        entry["data_offsets"] = [at, at + size]
        if other == name:
            entry["shape"] = [size]
        at += size
    return forged.bytes()


def of_nothing(rng: random.Random, base: bytes, bases: list[bytes]) -> bytes:
    """The file itself, taken apart and put together."""
    forged = Forgery.from_bytes(base)
    forged.rehash()
    return forged.bytes()


KINDS: dict[str, tuple[int, Callable[[random.Random, bytes, list[bytes]], bytes]]] = {
    "bytes": (28, of_bytes),
    "numbers": (20, of_numbers),
    "structure": (24, of_structure),
    "shapes": (12, of_shapes),
    "text": (8, of_text),
    "frames": (7, of_frames),
    "nothing": (1, of_nothing),
}

NEEDS: dict[str, Callable[[bytes], bool]] = {
    "numbers": is_raw,
    "shapes": is_plain,
    "frames": is_compressed,
    "nothing": is_raw,
}


def _change_numbers(rng: random.Random, forged: Forgery) -> None:
    names = list(forged.table)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(
            [name for name in names if not name.endswith((".keys", ".values"))] if rng.random() < 0.8 else names
        )
        span = _try(lambda name=name: range(len(forged.data))[forged.span(name)])  # type: ignore[misc]
        if span is None or len(span) < 4:
            continue
        at = span.start + 4 * rng.randrange((span.stop - span.start) // 4)
        old = int.from_bytes(forged.data[at : at + 4], "little", signed=True)
        new = rng.choice((old + 1, old - 1, old ^ 1 << rng.randrange(31), 0, 1, 11, 12, -1, (1 << 31) - 1, 0x7FC00000))
        if rng.random() < 0.2:  # what another element says
            other = span.start + 4 * rng.randrange((span.stop - span.start) // 4)
            new = int.from_bytes(forged.data[other : other + 4], "little", signed=True)
        forged.data[at : at + 4] = (new & 0xFFFFFFFF).to_bytes(4, "little")


def _change_tree(rng: random.Random, tree: Any) -> None:
    """One change at a place chosen from all of them."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in list(node.items()) if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(tree)
    if not places:
        return
    node, key = rng.choice(places)
    value = node[key]
    match rng.randrange(10):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(WORDS)] = value
        case 1 if isinstance(node, list):
            node.insert(key, value)
        case 2 if isinstance(node, dict):
            items = list(node.items())
            rng.shuffle(items)
            node.clear()
            node.update(items)
        case 3:
            other, at = rng.choice(places)
            try:
                node[key] = other[at]
            except (KeyError, IndexError):
                return
            if _endless(tree):
                node[key] = value
        case 4:
            node[key] = rng.choice(([value], {"a": value}, str(value), [], {}, None, True, False))
        case 5:
            nest: Any = 1
            for _ in range(rng.choice((3, 31, 32, 33, 200))):
                nest = [nest] if rng.random() < 0.5 else {"a": nest}
            node[key] = nest
        case 6 if type(value) in (int, float):
            node[key] = value + rng.choice((1, -1))
        case 7:
            node[key] = rng.choice(WORDS)
        case _:
            node[key] = rng.choice(NUMBERS)


def _endless(tree: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether a container holds itself."""
    if not isinstance(tree, dict | list):
        return False
    if id(tree) in above:
        return True
    return any(_endless(item, (*above, id(tree))) for item in (tree.values() if isinstance(tree, dict) else tree))


def _fit(rng: random.Random, forged: Forgery, *, with_tokens: bool) -> None:
    """Table, rows, hashes and data as the counts ask for; from FORMAT.md. Old numbers are used where there are any."""
    about, old = forged.about, {name: bytes(forged.data[forged.span(name)]) for name in forged.table}
    shapes: dict[str, tuple[str, list[int]]] = {}
    if with_tokens:
        shapes["tokens"] = ("I32", [about["document"]["tokens"]])
    for index, layer in enumerate(about["layers"]):
        shapes[f"layers.{index}.offsets"] = ("I32", [layer["kv_heads"] + 1])
        for name in ("positions", "admit", "scores"):
            shapes[f"layers.{index}.{name}"] = ("F32" if name == "scores" else "I32", [layer["entries"]])
    for index, layer in enumerate(about["layers"]):
        for name, width in (("keys", "d_k"), ("values", "d_v")):
            shapes[f"layers.{index}.{name}"] = (CODES[about["dtype"]], [layer["entries"], layer[width]])
    if sum(max(0, math.prod(shape)) for _, shape in shapes.values()) > 100_000:
        raise ValueError("too large for a test")
    forged.table.clear()
    forged.data.clear()
    for name, (code, shape) in shapes.items():
        size = math.prod(shape) * ITEMS[code]
        data = old.get(name, b"")[: max(0, size)]
        if name.endswith(".offsets") and shape[0] > 1:
            cut = sorted(
                rng.randrange(about["layers"][int(name.split(".")[1])]["entries"] + 1) for _ in range(shape[0] - 2)
            )
            data = b"".join(number.to_bytes(4, "little") for number in (0, *cut, _entries(about, name)))
        elif name.endswith(".positions") and rng.random() < 0.7:
            data = b"".join((number % 12).to_bytes(4, "little") for number in range(shape[0]))
        elif name.endswith(".admit") and rng.random() < 0.7:
            data = (1).to_bytes(4, "little") * shape[0]
        start = len(forged.data)
        forged.data += data + bytes(max(0, size - len(data)))
        forged.table[name] = {"dtype": code, "shape": shape, "data_offsets": [start, len(forged.data)]}
    about["tensors"] = {name: {"codec": "raw", "sizes": None, "blocks": []} for name in shapes}
    forged.rehash()


def _entries(about: dict[str, Any], name: str) -> int:
    return int(about["layers"][int(name.split(".")[1])]["entries"])


def _edited(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text))
    if rng.random() < 0.3:  # where a value begins
        at = rng.choice([place + 1 for place, letter in enumerate(text) if letter in ":[,"])
    match rng.randrange(6):
        case 0:
            return (
                text[:at]
                + rng.choice((" ", "\t", "\n", ",", '"', "\\", "}", "]", "[", "{", "0", "-", "e", "\x7f"))
                + text[at:]
            )
        case 1:
            return text[:at] + text[at + 1 :]
        case 2:  # a key twice
            start = text.find('"', at)
            stop = text.find(",", start)
            return text[:start] + text[start : stop + 1] * 2 + text[stop + 1 :] if 0 <= start < stop else text[:at]
        case 3:
            digits = [place for place, letter in enumerate(text) if letter.isdigit()]
            place = rng.choice(digits)
            return (
                text[:place]
                + rng.choice(("0", "00", "1.0", "1e1", "-1", "9" * 30, "9" * 5000, "NaN", "1e999"))
                + text[place + 1 :]
            )
        case 4:
            return text[:at] + "[" * rng.choice((1, 2000, 90000)) + text[at:]
        case _:
            return text.replace(
                rng.choice(("true", "false", "null", ",", ":")), rng.choice(("null", "true", " ", ", ", "::")), 1
            )


def _try(action: Callable[[], Any]) -> Any:
    """What the action gives; None when the header no longer has what it needs."""
    try:
        return action()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError):
        return None
