"""Recognising what was given instead of a KV file, so that the message can say what to do with it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from formats.errors import CorruptFile, FormatError, NotAKVFile

SNIFF_BYTES = 4096
# How every KV file begins, right after the 8 bytes of the header length.
OPENING = b'{"__metadata__":{"format":"pt","dropkv":"'

FETCH = "download it again with `hf download`"

# First bytes -> what it is, what to do.
KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "is a git-LFS pointer, not the file itself", f"run `git lfs pull`, or {FETCH}"),
    (b"GGUF", "is a GGUF model", "give its folder to --model, and a .kv file here"),
    (
        b"nsgg",
        "is a llama.cpp session file",
        "load it with llama.cpp (--prompt-cache); compress the document anew here",
    ),
    (
        b"ggsn",
        "is a llama.cpp session file",
        "load it with llama.cpp (--prompt-cache); compress the document anew here",
    ),
    (b"qsgg", "is a llama.cpp slot file", "restore it with llama-server; compress the document anew here"),
    (b"ggsq", "is a llama.cpp slot file", "restore it with llama-server; compress the document anew here"),
    (b"%PDF", "is a PDF document", "convert it (`pdftotext DOC.pdf DOC.txt`), then `dropkv compress DOC.txt`"),
    (b"\x1f\x8b", "is gzip data", "unpack it first with `gunzip`"),
    (b"\x28\xb5\x2f\xfd", "is zstd data", "unpack it first with `zstd -d`"),
    (b"\xfd7zXZ\x00", "is xz data", "unpack it first with `unxz`"),
    (b"PK\x05\x06", "is an empty zip archive", ""),
)


def check(head: bytes, size: int) -> None:
    """Raise unless the first bytes can be those of a safetensors file of `size` bytes with a dropkv entry."""
    if size == 0:
        raise NotAKVFile("is empty (0 bytes)", fix="download or make it again")
    length = int.from_bytes(head[:8], "little")
    if len(head) > 8 and OPENING.startswith(head[8 : 8 + len(OPENING)]):
        if 8 + length > size:
            raise CorruptFile(
                f"the header takes {length} bytes but the file ends after {size}: cut off or damaged",
                where="file bytes 0-7",
            )
        if size > 8 + len(OPENING):
            return
    if len(head) > 8 and head[8:9] == b"{" and 8 + length <= size:
        return
    raise _foreign(head, size)


def _foreign(head: bytes, size: int) -> FormatError:
    for opening, what, fix in KINDS:
        if head.startswith(opening):
            return NotAKVFile(what, fix=fix)
    if head.startswith(b"PK\x03\x04"):
        return _zip(head)
    if re.match(rb"\x80[\x02-\x05]", head):
        return NotAKVFile("is a Python pickle (a torch .pt file?), which is never opened here")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:200].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")):
        return NotAKVFile("is a web page, not the file behind it", fix=f"use the page's download link, or {FETCH}")
    if size < 16:
        return NotAKVFile(f"is too short ({size} bytes)", fix="download or make it again")
    if OPENING[2:] in head:
        return CorruptFile("the first bytes are damaged", where="file bytes 0-8")
    if _is_text(head):
        return NotAKVFile("is text, not a KV file", fix="compress it first: `dropkv compress DOC -o FILE.kv`")
    return NotAKVFile("is not a KV file")


def _zip(head: bytes) -> NotAKVFile:
    if b"application/epub+zip" in head:
        return NotAKVFile(
            "is an EPUB book", fix="convert it (`pandoc BOOK.epub -o BOOK.txt`), then `dropkv compress BOOK.txt`"
        )
    if b"data.pkl" in head:
        return NotAKVFile("is a torch .pt file (a zip archive with a pickle), which is never opened here")
    return NotAKVFile("is a zip archive", fix="unpack it first")


def _is_text(head: bytes) -> bool:
    if b"\0" in head:
        return False
    # The last character may be cut in two.
    return any(_decodes(head[: len(head) - cut]) for cut in range(4))


def _decodes(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def other_safetensors(names: Mapping[str, object], metadata: Mapping[str, object]) -> NotAKVFile:
    """The error for a safetensors file without a dropkv entry."""
    if any(re.fullmatch(r"2\.\d+", key) for key in metadata) or any(re.fullmatch(r"\d+\.\d+", name) for name in names):
        return NotAKVFile(
            "is an mlx-lm prompt cache",
            fix="use it with `mlx_lm.generate --prompt-cache-file`; compress the document anew here",
        )
    if any(name.endswith((".weight", ".bias")) for name in names):
        return NotAKVFile("holds model weights", fix="give its folder to --model, and a .kv file here")
    return NotAKVFile("is a safetensors file without a dropkv entry")
