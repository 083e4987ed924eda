"""What is read as a document and what is refused, with the fix named in the line."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import pytest

from dropkv.documents import Document, read_document
from dropkv.errors import DocumentError


def written(folder: Path, raw: bytes, name: str = "book.txt") -> str:
    path = folder / name
    path.write_bytes(raw)
    return str(path)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"one\ntwo\n", "one\ntwo"),
        (b"\xef\xbb\xbfone\r\ntwo\r\n\r\n  three", "one\ntwo\n\n  three"),
        ("  \u00fc\u4e2d \U0001f600\n".encode(), "\u00fc\u4e2d \U0001f600"),
        (b"# Title\n\n* <|im_end|> {{ x }}", "# Title\n\n* <|im_end|> {{ x }}"),
    ],
)
def test_text_is_tidied_and_its_bytes_hashed(tmp_path: Path, raw: bytes, text: str) -> None:
    document = read_document(written(tmp_path, raw, "notes.md"))
    assert document == Document("notes.md", text, hashlib.sha256(raw).hexdigest())


def test_no_folder_in_the_name(tmp_path: Path) -> None:
    assert read_document(written(tmp_path, b"x")).name == "book.txt"
    assert str(tmp_path) not in repr(read_document(written(tmp_path, b"x")))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is empty"),
        (b" \r\n\t\n", "only white space"),
        (b"\xef\xbb\xbf", "only white space"),
        (b"%PDF-1.7\n%\xe2\xe3", "pdftotext"),
        (b"\xef\xbb\xbf\n%PDF-1.4", "pdftotext"),
        (b"PK\x03\x04" + b"\0" * 26 + b"mimetypeapplication/epub+zip", "pandoc BOOK.epub"),
        (b"PK\x03\x04" + b"\0" * 26 + b"[Content_Types].xml" + b"word/document.xml", "pandoc BOOK.docx"),
        (b"PK\x03\x04rest", "unzip"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "soffice"),
        (b"{\\rtf1 hello}", "pandoc BOOK.rtf"),
        (b"\x1f\x8b\x08", "gunzip"),
        ("\ufeffhello".encode("utf-16-le"), "iconv -f UTF-16"),
        (b"abc\0def", "NUL at byte 3"),
        ("caf\u00e9 au lait".encode("latin-1"), "0xe9 at byte 3"),
    ],
)
def test_what_is_no_text_is_refused_with_the_fix(tmp_path: Path, raw: bytes, said: str) -> None:
    path = written(tmp_path, raw)
    with pytest.raises(DocumentError) as caught:
        read_document(path)
    line = str(caught.value)
    assert line.startswith(path) and said in line and "\n" not in line


def test_latin1_suggests_iconv(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="iconv -f LATIN1 -t UTF-8"):
        read_document(written(tmp_path, b"\xfcber"))


def test_missing_folder_and_nul(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no such file; check the path, or give - "):
        read_document(str(tmp_path / "none.txt"))
    with pytest.raises(DocumentError, match="is a folder"):
        read_document(str(tmp_path))
    with pytest.raises(DocumentError, match="cannot be read"):
        read_document("a\0b")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser reads everything")
def test_unreadable(tmp_path: Path) -> None:
    path = written(tmp_path, b"x")
    os.chmod(path, 0)
    with pytest.raises(DocumentError, match=r"permission denied; .*chmod"):
        read_document(path)


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        read_document(str(tmp_path / "a\x1b[2Jb\nc"))
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b"from a pipe\r\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"))
    assert read_document("-") == Document("stdin", "from a pipe", hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(DocumentError, match="standard input: is empty"):
        read_document("-")


def test_text_in_memory() -> None:
    document = Document.of(" one\r\ntwo ", name="note")
    assert (document.name, document.text) == ("note", "one\ntwo")
    assert document.sha256 == hashlib.sha256(b" one\r\ntwo ").hexdigest()
    with pytest.raises(DocumentError, match="note: is empty"):
        Document.of("", name="note")
    with pytest.raises(DocumentError, match="half a surrogate pair"):
        Document.of("a\ud800b")
