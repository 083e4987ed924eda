"""Recognising what was given instead of a KV file, so that the message can say what to do with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from formats.errors import CorruptFile, FormatError, NotAKVFile

SNIFF_BYTES = 4096
# How every KV file begins, right after the 8 bytes of the header length.
OPENING = b'{"__metadata__":{"format":"pt","dropkv":"'

FETCH = "download it again with `hf download`"
ANEW = "compress the document anew here (`dropkv compress`)"
SESSION = ("is a llama.cpp session file", f"load it with llama.cpp (`--prompt-cache`); {ANEW}")
SLOT = ("is a llama.cpp sequence state (a saved slot)", f"restore it with llama-server; {ANEW}")
OLD_GGML = ("is a model in llama.cpp's format from before GGUF", "get the model as GGUF or safetensors for --model")
PICKLED = "which is never opened here: it can run code"
TENSORS = f"if it holds a cache, {ANEW}; if it holds a model, give --model a folder with *.safetensors"

# First bytes -> what it is, what to do. llama.cpp writes its magic numbers little-endian: "ggsn" stands as "nsgg".
KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "is a git-LFS pointer, not the file itself", f"run `git lfs pull`, or {FETCH}"),
    (b"GGUF", "is a GGUF model", "give it to --model, and a .kv file here"),
    (b"nsgg", *SESSION),
    (b"ggsn", *SESSION),
    (b"qsgg", *SLOT),
    (b"ggsq", *SLOT),
    (b"tjgg", *OLD_GGML),
    (b"fmgg", *OLD_GGML),
    (b"lmgg", *OLD_GGML),
    (b"algg", "is a llama.cpp LoRA adapter", "merge it into its model, and give the model's folder to --model"),
    # The pickled number by which torch.save marked its files before release 1.6.
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", f"is a torch .pt file (an old one, a pickle), {PICKLED}", TENSORS),
    (b"\x93NUMPY", "is a NumPy .npy file", "give a .kv file; numbers alone do not say which model made them"),
    (b"\x89HDF", "is an HDF5 file", ""),
    (b"%PDF", "is a PDF document", "convert it (`pdftotext DOC.pdf DOC.txt`), then `dropkv compress DOC.txt`"),
    (b"\x1f\x8b", "is gzip data", "unpack it first with `gunzip`"),
    (b"\x28\xb5\x2f\xfd", "is zstd data", "unpack it first with `zstd -d`"),
    (b"\xfd7zXZ\x00", "is xz data", "unpack it first with `unxz`"),
    (b"BZh", "is bzip2 data", "unpack it first with `bunzip2`"),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive", "unpack it first with `7z x`"),
    (b"PK\x05\x06", "is an empty zip archive", ""),
)
PAGES = (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")


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
        return NotAKVFile(f"is a Python pickle (a torch .pt file?), {PICKLED}", fix=TENSORS)
    if head[257:262] == b"ustar":
        return NotAKVFile("is a tar archive", fix="unpack it first with `tar xf`")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:200].lower().startswith(PAGES):
        return NotAKVFile("is a web page, not the file behind it", fix=f"use the page's download link, or {FETCH}")
    if size < 16:
        return NotAKVFile(f"is too short ({size} bytes) to be a KV file", fix="download or make it again")
    if OPENING[2:] in head:
        return CorruptFile("the first bytes are damaged", where="file bytes 0-8")
    if re.match(rb'.{3}[\0-\x05]\0{4}\{\s*"', head, re.DOTALL):  # a header below 100 MB, and no room for it
        return NotAKVFile(f"is a safetensors file that was cut off after {size} bytes, and no KV file", fix=TENSORS)
    if _is_text(head):
        return NotAKVFile("is text, not a KV file", fix="compress it first: `dropkv compress DOC -o FILE.kv`")
    return NotAKVFile("is not a KV file")


def _zip(head: bytes) -> NotAKVFile:
    """The name of the first member stands 30 bytes behind the start, its length at byte 26."""
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if b"application/epub+zip" in head:
        return NotAKVFile(
            "is an EPUB book", fix="convert it (`pandoc BOOK.epub -o BOOK.txt`), then `dropkv compress BOOK.txt`"
        )
    if b"data.pkl" in head or b"constants.pkl" in head:
        return NotAKVFile(f"is a torch .pt file (a zip archive with a pickle), {PICKLED}", fix=TENSORS)
    if first.endswith(b".npy"):
        return NotAKVFile("is a NumPy .npz archive", fix=f"if it holds a cache, {ANEW}")
    if first in (b"[Content_Types].xml", b"mimetype") or first.startswith((b"_rels/", b"word/", b"docProps/")):
        return NotAKVFile("is an office document", fix="save it as plain text, then `dropkv compress DOC.txt`")
    return NotAKVFile("is a zip archive", fix="unpack it first with `unzip`")


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
    # mlx-lm numbers its tensors by layer and part, and its metadata by kind, where 2 is the class of a layer's cache.
    classes = any(re.fullmatch(r"2\.\d+(\.\d+)*", key) for key in metadata)
    if classes or (names and all(re.fullmatch(r"\d+(\.\d+)+", name) for name in names)):
        made_by = metadata.get("1.model")
        of = f" of {json.dumps(made_by)[:80]}" if isinstance(made_by, str) else ""
        return NotAKVFile(
            f"is an mlx-lm prompt cache{of}", fix=f"use it with `mlx_lm.generate --prompt-cache-file`; {ANEW}"
        )
    if any(".lora_A" in name or ".lora_down" in name for name in names):
        return NotAKVFile("is a LoRA adapter", fix="merge it into its model, and give the model's folder to --model")
    if any(name.endswith((".weight", ".bias", ".qweight", ".scales")) for name in names):
        return NotAKVFile("holds model weights", fix="give its folder to --model, and a .kv file here")
    if "kv_chunk" in names or list(names) == ["kv_cache"]:
        return NotAKVFile(
            "is a cache chunk of LMCache or vLLM", fix=f"only the server that wrote it can use it; {ANEW}"
        )
    return NotAKVFile("is a safetensors file without a dropkv entry")
