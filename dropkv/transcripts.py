"""Conversations on disk: JSON lines that can be gone on with, or Markdown to read.

A transcript (.jsonl) has a head that says which document and tokenizer it belongs to, then a line for each turn with the answer's own
tokens, so that whoever goes on with it has exactly what was said. The budget and the method of the .kv file may be others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropkv.errors import IdentityError, QuestionError, UsageError
from formats import Metadata
from formats.errors import naming, printable, show_path
from formats.temporary import replacing

if TYPE_CHECKING:
    from dropkv.generate import Session, Turn

VERSION = 1
SUFFIX = ".jsonl"
OTHER_SUFFIXES = (".kv", ".safetensors", ".json")  # which promise something else
HEAD = "dropkv_chat"


def save_turns(
    path: str | Path, turns: Sequence[Turn], session: Session, metadata: Metadata, *, overwrite: bool = False
) -> None:
    """Write turns to a file: a transcript where its name ends in .jsonl, else Markdown.

    Raises UsageError for a name that says it is something else, such as a .kv file, a formats.FormatError when it exists or cannot be
    written.
    """
    name = os.fspath(path).lower() if isinstance(path, str | os.PathLike) else ""
    if name.endswith(OTHER_SUFFIXES):
        raise UsageError(
            f"{show_path(path)}: a conversation is no such file: name it NAME{SUFFIX} to go on with it, NAME.md to read it"
        )
    answers = [session.text(turn.tokens).strip() for turn in turns]
    if name.endswith(SUFFIX):
        lines = [_head(metadata), *map(_line, turns, answers)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    else:
        document = metadata.document
        text = f"# {printable(document.name)}\n\n{metadata.model.id}, {document.tokens:,} tokens\n"
        text += "".join(
            f"\n## {turn.question.strip()}\n\n{answer}\n" for turn, answer in zip(turns, answers, strict=True)
        )
    with (
        naming(path),
        replacing(path, overwrite=overwrite) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        file.write(text.encode("utf-8", "replace"))


def read_turns(path: str | Path, session: Session, metadata: Metadata) -> list[Turn]:
    """The turns of a transcript.

    Raises QuestionError for what is none, IdentityError for one about another document or of another tokenizer.
    """
    head, *lines = read_lines(path)
    check_head(head, metadata, path)
    vocabulary = int(session.model.network.get_input_embeddings().weight.shape[0])
    return [_turn(line, vocabulary, f"{show_path(path)}: line {number}") for number, line in enumerate(lines, 2)]


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The head of a transcript and a dictionary for each turn; neither a model nor torch is needed. Raises QuestionError for what is none."""
    if not isinstance(path, str | os.PathLike):
        raise QuestionError(f"{printable(repr(path), 80)}: is no file name: name a file that /save NAME.jsonl wrote")
    shown = show_path(path)
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise QuestionError(
            f"{shown}: cannot be read ({error.strerror}): name a file that /save NAME.jsonl wrote"
        ) from None
    except (ValueError, RecursionError):
        raise QuestionError(f"{shown}: is no transcript: name a file that /save NAME.jsonl wrote") from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get(HEAD) != VERSION:
        raise QuestionError(f"{shown}: is no transcript of version {VERSION}: name a file that /save NAME.jsonl wrote")
    for number, line in enumerate(lines[1:], 2):
        _parts(line, f"{shown}: line {number}")
    return lines


def check_head(head: dict[str, Any], metadata: Metadata, path: str | Path) -> None:
    """Raise IdentityError for the head of a transcript that is about another document, or of another tokenizer, than a .kv file."""
    for key, own in _head(metadata).items():
        if key not in ("document", "model") and head.get(key) != own:
            found = printable(str(head.get(key)))
            raise IdentityError(
                f"{show_path(path)}: its {key.replace('_', ' ')} is {found}, that of the .kv file {own}: use the file it was made with"
            )


def _head(metadata: Metadata) -> dict[str, Any]:
    document, tokenizer = metadata.document, metadata.tokenizer
    return {
        HEAD: VERSION,
        "document": document.name,
        "document_sha256": document.sha256,
        "document_tokens": document.tokens,
        "model": metadata.model.id,
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.template_hash,
    }


def _line(turn: Turn, answer: str) -> dict[str, Any]:
    return {"question": turn.question, "answer": answer, "tokens": turn.tokens, "stopped": turn.stopped}


def _parts(line: Any, place: str) -> tuple[str, list[Any], bool]:
    """Question, tokens and whether the answer had ended, of a line."""
    question, tokens, stopped = (
        line.get(key) if isinstance(line, dict) else None for key in ("question", "tokens", "stopped")
    )
    if not isinstance(question, str) or not isinstance(tokens, list) or not isinstance(stopped, bool):
        raise QuestionError(f"{place} is no turn with question, tokens and stopped: save the conversation again")
    return question, tokens, stopped


def _turn(line: Any, vocabulary: int, place: str) -> Turn:
    from dropkv.generate import Turn

    question, tokens, stopped = _parts(line, place)
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise QuestionError(f"{place} has tokens that the model does not know: save the conversation again")
    return Turn(question, tokens, stopped)
