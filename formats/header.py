"""The header of a KV file: one JSON text with one spelling, which says everything and ends with its own hash.

It is written and read here and nowhere else. Nothing of it is believed before its hash, its spelling, the metadata and
the tensor table have been checked against each other and against the size of the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from formats import codecs, layout, sniff
from formats.errors import CorruptFile, UnsupportedVersion, WriteFailed
from formats.fields import Fields, all_hex
from formats.hashing import DIGITS, digest
from formats.layout import TensorInfo
from formats.metadata import Metadata
from formats.source import Source

FORMAT_VERSION = 2  # the newest that is read; a file says the oldest that has all it needs
PLAIN, CODED = 1, 2  # entries as they are; quantised or compressed ones

BEFORE = ("format_version", "oldest_reader")
ROW = ("codec", "sizes", "blocks")
HASH_KEY = ',"hash":"'

# JSON values a header may hold: some, and one for so many characters. Parsed, a value takes up to 100 times its text.
MIN_VALUES = 16384
CHARACTERS_PER_VALUE = 8
STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"')


@dataclass(frozen=True)
class Header:
    """A checked header; `data_start` is the file byte where the tensors begin, `zstd` the level of compressed tensors."""

    metadata: Metadata
    tensors: dict[str, TensorInfo]
    file_bytes: int
    data_start: int
    block_bytes: int
    format_version: int = PLAIN
    oldest_reader: int = PLAIN
    zstd: int | None = None


def build(
    metadata: Metadata,
    tensors: Sequence[TensorInfo],
    hashes: Mapping[str, Sequence[str]] | None,
    block_bytes: int,
    zstd: int | None = None,
) -> bytes:
    """The first bytes of the file: header length, JSON, padding to a multiple of 8.

    zstd: the level of those tensors that have this codec. Without hashes the same number of bytes, for the place where
    the tensors begin.
    """
    rows: dict[str, object] = {}
    for info in tensors:
        count = layout.block_count(info.size, block_bytes)
        blocks = ["0" * DIGITS] * count if hashes is None else list(hashes[info.name])
        row = {"codec": info.codec, "sizes": None if info.sizes is None else list(info.sizes), "blocks": blocks}
        rows[info.name] = row if info.sizes is None else row | {"stored": list(info.stored)}
    version = _version_needed(metadata, tensors)
    about = {
        "format_version": version,
        "oldest_reader": version,
        **metadata.to_json(),
        "block_bytes": block_bytes,
        **({} if version == PLAIN else {"zstd": zstd}),
        "tensors": rows,
    }
    table = {info.name: info.table_entry() for info in tensors}
    inner = spell(about)[:-1]
    inner += f'{HASH_KEY}{_header_hash(inner, table)}"}}'
    text = spell({"__metadata__": {"format": "pt", "dropkv": inner}, **table}).encode("ascii")
    text += b" " * (-len(text) % 8)
    data_bytes = tensors[-1].stop
    if len(text) > layout.header_limit(8 + len(text) + data_bytes):
        raise WriteFailed(
            f"the header takes {len(text)} bytes, too many for {data_bytes} bytes of data",
            fix="store less in the metadata",
        )
    return len(text).to_bytes(8, "little") + text


def _version_needed(metadata: Metadata, tensors: Iterable[TensorInfo]) -> int:
    coded = metadata.quantization is not None or any(info.codec != "raw" for info in tensors)
    return CODED if coded else PLAIN


def spell(value: object) -> str:
    """JSON in its one spelling here: no blanks, ASCII only, keys as they stand."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _header_hash(inner: str, table: object) -> str:
    """Hash over the dropkv JSON up to its hash, a line feed, and the tensor table."""
    return digest(f"{inner}\n{spell(table)}".encode("ascii"))


def parse(source: Source) -> Header:
    """Read and check the header; the tensors' bytes are not touched.

    Raises NotAKVFile, UnsupportedVersion or CorruptFile; allocates a small multiple of the header's length.
    """
    text = _read_text(source)
    try:
        return check(text, source.size)
    except RecursionError as error:
        raise CorruptFile("is nested too deeply", where="header") from error


def check(text: str, file_bytes: int) -> Header:
    """The header in this JSON text, checked in itself and against the length of the file."""
    outer = _object(text, "header")
    meta = outer.pop("__metadata__", None)
    inner = meta.get("dropkv") if type(meta) is dict else None
    if type(inner) is not str:
        raise sniff.other_safetensors(outer, meta if type(meta) is dict else {})
    body, found = inner[: -len(HASH_KEY) - DIGITS - 2], inner[len(inner) - DIGITS - 2 : -2]
    if not inner.isascii() or inner != f'{body}{HASH_KEY}{found}"}}' or found != _header_hash(body, outer):
        raise CorruptFile("does not match its own hash: a byte was changed", where="header")
    about = _object(body + "}", "metadata")
    version, oldest = _versions(about)
    if meta != {"format": "pt", "dropkv": inner} or _padded({"__metadata__": meta, **outer}) != text:
        raise CorruptFile(
            "is not in the one spelling of this format (key order, blanks, repeated keys)", where="header"
        )
    metadata, rest = _content(about, version, oldest, body)
    tensors = _tensors(metadata, rest["tensors"], outer, rest["block_bytes"])
    header = Header(
        metadata, tensors, file_bytes, 8 + len(text), rest["block_bytes"], version, oldest, rest.get("zstd")
    )
    _check_version(header)
    _check_size(header)
    return header


def _read_text(source: Source) -> str:
    head = bytearray(min(source.size, sniff.SNIFF_BYTES))
    source.read_into(0, memoryview(head))
    sniff.check(bytes(head), source.size)
    length = int.from_bytes(head[:8], "little")
    if length > layout.header_limit(source.size):
        raise CorruptFile(
            f"a header of {length} bytes is longer than a file of {source.size} bytes can need", where="file bytes 0-7"
        )
    if length % 8:
        raise CorruptFile(f"the header takes {length} bytes, not a multiple of 8", where="file bytes 0-7")
    raw = bytearray(length)
    source.read_into(8, memoryview(raw))
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError as error:
        raise CorruptFile("is not an ASCII character", where=f"file byte {8 + error.start}") from error


def _object(text: str, where: str) -> dict[str, Any]:
    """Parse one JSON object, with every way in which a hostile text can fail turned into CorruptFile."""
    _refuse_crowd(text, where)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise CorruptFile(f"is not JSON: {error.msg.lower()}", where=f"{where} character {error.pos}") from error
    except ValueError as error:
        raise CorruptFile("holds a number out of range", where=where) from error
    if type(value) is not dict:
        raise CorruptFile("is not a JSON object", where=where)
    return value


def _refuse_crowd(text: str, where: str) -> None:
    """Refuse a text of far more values than a header of its length has, before they are built."""
    limit = MIN_VALUES + len(text) // CHARACTERS_PER_VALUE
    if _values(text) <= limit:
        return
    count = start = 0
    for quoted in STRING.finditer(text):  # what looks like values may be quoted
        count += _values(text[start : quoted.start()])
        start = quoted.end()
        if count > limit:
            break
    if count > limit or count + _values(text[start:]) > limit:
        raise CorruptFile(f"holds more than {limit} values, which is more than its length allows", where=where)


def _values(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is out of range")
    return value


def _padded(value: object) -> str:
    text = spell(value)
    return text + " " * (-len(text) % 8)


def _versions(about: Mapping[str, Any]) -> tuple[int, int]:
    version, oldest = about.get("format_version"), about.get("oldest_reader")
    if type(version) is not int or type(oldest) is not int or not 1 <= oldest <= version:
        raise CorruptFile("format_version and oldest_reader are no pair of versions", where="metadata")
    if oldest > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"is a KV file of version {version} and needs a reader of version {oldest} or newer; "
            f"this one reads version {FORMAT_VERSION}"
        )
    return version, oldest


def _content(about: dict[str, Any], version: int, oldest: int, body: str) -> tuple[Metadata, dict[str, Any]]:
    """Metadata, and the keys after it: block size, zstd level, rows of the tensors.

    A newer writer may have added top-level keys, which are skipped.
    """
    own = Metadata.keys()
    after = ["block_bytes", "tensors"] if oldest < CODED else ["block_bytes", "zstd", "tensors"]
    known = [*BEFORE, *own, *after]
    if version > FORMAT_VERSION:
        about = {key: value for key, value in about.items() if key in known}
        body = spell(about)[:-1]
    try:
        get = Fields(about, "", known)
        block_bytes = get.whole("block_bytes", layout.MIN_BLOCK_BYTES, layout.MAX_BLOCK_BYTES)
        if block_bytes & (block_bytes - 1):
            raise CorruptFile(f"is {block_bytes}, not a power of two", where="block_bytes")
        if "zstd" in after:
            get.optional_whole("zstd", *codecs.LEVELS)
        metadata = Metadata.from_json({key: about[key] for key in own})
        if type(about["tensors"]) is not dict:
            raise CorruptFile("is not an object", where="tensors")
        rest = {key: about[key] for key in after}
        again = {**{key: about[key] for key in BEFORE}, **metadata.to_json(), **rest}
        if spell(again)[:-1] != body:
            raise CorruptFile("is not in the one spelling of this format (key order, blanks, repeated keys)")
    except CorruptFile as error:
        error.where = f"metadata {error.where}".strip()
        raise
    return metadata, rest


def _tensors(
    metadata: Metadata, rows: dict[str, Any], table: dict[str, Any], block_bytes: int
) -> dict[str, TensorInfo]:
    """The tensors that the metadata implies, each equal to its entry in the table and with a hash for every block."""
    expected = layout.plan(metadata, "tokens" in rows)
    names = {info.name: info for info in expected}
    for what, found in (("tensor table", table), ("metadata tensors", rows)):
        if list(found) != list(names):
            missing, extra = (
                [name for name in names if name not in found],
                [name for name in found if name not in names],
            )
            reason = f"lacks {missing[0]}" if missing else f"holds {extra[0]!a:.60}" if extra else "is out of order"
            raise CorruptFile(f"{reason}: not the tensors of {len(metadata.layers)} layers", where=what)
    coded = [_coded(info, rows[info.name], block_bytes) for info in expected]
    placed = layout.place(coded)
    for info in placed:
        if spell(table[info.name]) != spell(info.table_entry()):
            raise CorruptFile(
                f"the tensor table says {spell(table[info.name]):.120}, the metadata implies "
                f"{spell(info.table_entry())}",
                where=info.name,
            )
    return {info.name: _hashed(info, rows[info.name], block_bytes) for info in placed}


def _coded(info: TensorInfo, row: object, block_bytes: int) -> TensorInfo:
    """The tensor with the codec that its row in the metadata says, and the length of its blocks in it."""
    coded = type(row) is dict and row.get("codec") == "zstd"
    get = Fields(row, f"metadata tensors[{info.name}]", (*ROW, "stored") if coded else ROW)
    codec, sizes = get.text("codec"), get.values["sizes"]
    if codec != "raw" and not coded:
        raise UnsupportedVersion(
            f"is stored with the codec {codec!a:.40}, which a newer reader than version {FORMAT_VERSION} reads",
            where=info.name,
        )
    if coded:
        count, high = layout.block_count(info.size, block_bytes), codecs.most_stored(block_bytes)
        wanted = f"a list of {count} whole numbers from 1 to {high}"
        sizes = _list(
            get, "sizes", count, lambda found: all(type(size) is int and 1 <= size <= high for size in found), wanted
        )
        if not count or not codecs.worthwhile(info.size, sum(sizes)):
            raise CorruptFile(f"is compressed from {info.size} to {sum(sizes)} bytes: not worth it", where=info.name)
        return replace(info, codec=codec, sizes=tuple(sizes))
    if sizes is not None:
        raise get.wrong("sizes", "null, as raw tensors have it")
    return info


def _hashed(info: TensorInfo, row: object, block_bytes: int) -> TensorInfo:
    """The tensor with the hashes of its blocks."""
    keys = ROW if info.sizes is None else (*ROW, "stored")
    get = Fields(row, f"metadata tensors[{info.name}]", keys)
    count = layout.block_count(info.size, block_bytes)
    wanted = f"a list of {count} hashes of {DIGITS} hexadecimal digits"
    hashes = [_list(get, key, count, lambda found: all_hex(found, DIGITS), wanted) for key in keys[2:]]
    if list(get.values) != list(keys):
        raise CorruptFile("has its keys out of order", where=get.where)
    return replace(info, blocks=tuple(hashes[0]), stored=tuple(hashes[1]) if len(hashes) > 1 else ())


def _list(get: Fields, key: str, count: int, fits: Callable[[list[Any]], bool], wanted: str) -> list[Any]:
    value = get.values[key]
    if type(value) is not list or len(value) != count or not fits(value):
        raise get.wrong(key, wanted)
    return value


def _check_version(header: Header) -> None:
    """A file says the oldest version that has all it needs, so that there is one way to write it."""
    needed = _version_needed(header.metadata, header.tensors.values())
    if header.oldest_reader < needed:
        raise CorruptFile(f"is {header.oldest_reader}, and the file needs {needed}", where="metadata oldest_reader")
    if header.format_version <= FORMAT_VERSION and header.format_version != needed:
        raise CorruptFile(f"is {header.format_version}, and the file needs {needed}", where="metadata format_version")
    compressed = any(info.codec != "raw" for info in header.tensors.values())
    if compressed != (header.zstd is not None):
        raise CorruptFile("does not go with the codecs of the tensors", where="metadata zstd")


def _check_size(header: Header) -> None:
    end = header.data_start + max(info.stop for info in header.tensors.values())
    if header.file_bytes < end:
        cut = next(info for info in header.tensors.values() if header.data_start + info.stop > header.file_bytes)
        raise CorruptFile(f"the file ends after {header.file_bytes} of {end} bytes: cut off", where=cut.name)
    if header.file_bytes > end:
        raise CorruptFile(f"{header.file_bytes - end} bytes follow the last tensor", where=f"file byte {end}")
    raw, most = sum(info.size for info in header.tensors.values()), codecs.most_raw(end)
    if raw > most:
        raise CorruptFile(f"holds {raw} bytes in {end}, more than {most}: a bomb", where="tensors")
