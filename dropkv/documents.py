"""Reading one document: what is text and what is not, and what to do about the latter."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import PurePath

from dropkv.errors import DocumentError, no_text
from formats.errors import printable, show_path
from formats.sniff import OPENING, SNIFF_BYTES

STDIN = "-"
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # how such a text begins


@dataclass(frozen=True)
class Document:
    """A text to compress: stripped of outer white space, without byte order mark, lines ended by LF.

    name: base name of its file, no folder. sha256: of the raw bytes, 64 hexadecimal digits.
    """

    name: str
    text: str = field(repr=False)
    sha256: str

    @classmethod
    def of(cls, text: str, name: str = "text") -> Document:
        """A document from text in memory; raises DocumentError when it is empty, no valid Unicode or no text."""
        if not isinstance(name, str):
            raise DocumentError(f"the name of a document is {no_text(name)}")
        if not isinstance(text, str):
            raise DocumentError(f"{name}: the document is {no_text(text)}")
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DocumentError(
                f"{name}: character {error.start} is half a surrogate pair, which is no text; read the file as UTF-8"
            ) from None
        return cls(name, _tidy(text, name), hashlib.sha256(raw).hexdigest())


def read_document(path: str | os.PathLike[str]) -> Document:
    """The document in a file, or on standard input for "-".

    Raises DocumentError for what is missing, unreadable, empty or no UTF-8 text, naming the fix.
    """
    if not isinstance(path, str | os.PathLike):
        raise DocumentError(f"{printable(repr(path), 80)}: is no file name; give a path, or compress the text itself")
    if os.fspath(path) == STDIN:
        raw, name, shown = sys.stdin.buffer.read(), "stdin", "standard input"
    else:
        shown = show_path(path)
        raw, name = _read_bytes(path, shown), PurePath(path).name
    return Document(name, _tidy(_decode(raw, shown), shown), hashlib.sha256(raw).hexdigest())


def _read_bytes(path: str | os.PathLike[str], shown: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        if "://" in shown:
            raise DocumentError(
                f"{shown}: is an address; download the text first (`curl -L -o BOOK.txt ADDRESS`), then compress the file"
            ) from None
        raise DocumentError(f"{shown}: no such file; check the path, or give - to read standard input") from None
    except IsADirectoryError:
        raise DocumentError(f"{shown}: is a folder; give the text file in it") from None
    except PermissionError:
        raise DocumentError(f"{shown}: permission denied; make it readable with chmod +r") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError(f"{shown}: cannot be read ({reason}); check the path") from None


def _decode(raw: bytes, shown: str) -> str:
    foreign = _foreign(raw)
    if foreign:
        raise DocumentError(f"{shown}: {foreign}")
    if b"\0" in raw:
        raise DocumentError(
            f"{shown}: is binary (a NUL at byte {raw.index(0)}), not text; give a plain text file in UTF-8"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 (0x{raw[error.start]:02x} at byte {error.start})"
        raise DocumentError(f"{shown}: {what}; convert it: {to_utf8(raw)}") from None


def _foreign(raw: bytes) -> str:
    """What a well-known other format is and which program turns it into text, or nothing."""
    if b"%PDF-" in raw[:1024]:
        return "is a PDF; convert it first: pdftotext BOOK.pdf BOOK.txt"
    if OPENING in raw[:SNIFF_BYTES]:
        return "is a .kv file, which holds a document already: ask it with `dropkv query`, make it smaller with `dropkv shrink`"
    if raw.startswith(b"PK\x03\x04"):
        if b"application/epub+zip" in raw[:256]:
            return "is an EPUB; convert it first: pandoc BOOK.epub -t plain --wrap=none -o BOOK.txt"
        if b"word/" in raw:
            return "is a Word document; convert it first: pandoc BOOK.docx -t plain --wrap=none -o BOOK.txt"
        return (
            "is a zip archive; unpack it (unzip), and convert an office document first: pandoc OLD -t "
            "plain --wrap=none -o BOOK.txt"
        )
    if raw.startswith(b"\xd0\xcf\x11\xe0"):
        return "is an old office document; convert it first: soffice --headless --convert-to txt:Text BOOK.doc"
    if raw.startswith(b"{\\rtf"):
        return "is RTF; convert it first: pandoc BOOK.rtf -t plain --wrap=none -o BOOK.txt"
    if raw.startswith(b"\x1f\x8b"):
        return "is gzip; unpack it first: gunzip BOOK.txt.gz"
    if raw.startswith(UTF16):
        return f"is UTF-16; convert it first: {to_utf8(raw)}"
    return ""


def to_utf8(raw: bytes) -> str:
    """The command that makes UTF-8 of a text that is none."""
    return f"iconv -f {'UTF-16' if raw.startswith(UTF16) else 'LATIN1'} -t UTF-8 OLD > NEW"


def _tidy(text: str, shown: str) -> str:
    tidy = text.removeprefix("\ufeff").replace("\r\n", "\n").strip()
    if not tidy:
        what = "holds only white space" if text else "is empty"
        raise DocumentError(f"{shown}: {what}; give a document with text in it")
    return tidy
