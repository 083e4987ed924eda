"""A file of questions is read the same way whatever it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropkv.compression import compress_document
from dropkv.documents import Document
from dropkv.errors import QuestionError
from dropkv.question_files import questions_in, read_questions
from dropkv.settings import CompressSettings

ASKED = ("Who kept the ledger?", "Questions about ships.")
WRITTEN = "\ufeffWho kept the ledger?\r\n\n# not this one\n  Questions about ships.  \n  #nor this\n"


def test_a_file_is_its_lines_without_blank_ones_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(WRITTEN.encode())
    assert read_questions(path) == ASKED
    assert questions_in(WRITTEN.encode(), "standard input") == ASKED


def test_an_observer_sees_what_would_be_asked(tiny_llama, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    document = Document.of("The harbour master kept the ledger in a locked drawer. " * 6)
    files = (tmp_path / "with.txt", tmp_path / "without.txt")
    for path, text in zip(files, (WRITTEN, "\n".join(ASKED)), strict=True):
        path.write_text(text)
    made = [
        compress_document(tiny_llama, document, CompressSettings(budget=0.5, observe=f"questions:{path}")).metadata
        for path in files
    ]
    counts, digests = zip(*((one.observer["count"], one.observer["digest"]) for one in made), strict=True)
    assert counts == (2, 2) and digests[0] == digests[1]


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"\n \n", "no question in .*list.txt: write one a line"),
        (b"# only a comment\n", "no question in .*list.txt"),
        ("Who?".encode("utf-16"), "is not UTF-8 text; convert it: iconv -f UTF-16 -t UTF-8"),
        (b"caf\xe9?", "is not UTF-8 text; convert it: iconv -f LATIN1 -t UTF-8"),
    ],
)
def test_what_is_no_list_of_questions_is_told(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(raw)
    with pytest.raises(QuestionError, match=words):
        read_questions(path)


@pytest.mark.parametrize("name, reason", [("none.txt", "No such file"), ("", "Is a directory"), ("a\0b", "null")])
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(QuestionError, match=f"cannot be read .*{reason}.*: give a text file with one question a line"):
        read_questions(tmp_path / name)
