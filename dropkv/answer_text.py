"""Answer tokens as text, without the beginning of a character at their end.

Tokens may be single bytes, so an answer can end, at its token limit or while it is streamed, inside a character of several. Decoders show
such bytes as U+FFFD, as they do bytes that can never become a character; the model may also have written U+FFFD itself. Only the first
kind is left out, and it alone becomes another text when more tokens come.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

UNKNOWN = "\ufffd"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in the vocabulary of a SentencePiece tokenizer
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# The letters by which byte-level vocabularies (GPT-2's invention) write bytes: themselves where they can be seen, else from U+0100 on.
LETTERS = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}


class AnswerText:
    """Decodes the answers of one tokenizer of transformers; special_ids: the tokens that are no text."""

    def __init__(self, tokenizer: Any, special_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.special_ids = special_ids
        spelled = tokenizer.convert_ids_to_tokens(
            tokenizer("\u00e9", add_special_tokens=False, verbose=False).input_ids
        )
        self.letters = "".join(map(str, spelled)).endswith("\u00c3\u00a9")  # its two bytes in the letters above

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out. What is decoded of more tokens starts with it."""
        kept = [token for token in tokens if token not in self.special_ids]
        text = self._decode(kept)
        if not text.endswith(UNKNOWN):
            return text
        spelled = zip(kept, self.tokenizer.convert_ids_to_tokens(kept), strict=True)
        known = [
            (token, str(name)) for token, name in spelled if name is not None
        ]  # a model may have more ids than words
        kept, names = [token for token, _ in known], [name for _, name in known[-4:]]  # a character has at most 4 bytes
        if BYTE.fullmatch(names[-1]):
            # Decoders of such tokens spoil the whole run of bytes for the sake of its end, so the end must not get there.
            return self._decode(kept[: len(kept) - _unfinished(_run(names))])
        if self.letters:
            return text[:-1] if _unfinished(_bytes("".join(names))) else text
        return text.rstrip(UNKNOWN)

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up would take spaces back that were there, and were shown, before the next token.
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _run(names: list[str]) -> bytes:
    """The bytes at the end of tokens that are a byte each."""
    found: list[int] = []
    for name in reversed(names):
        match = BYTE.fullmatch(name)
        if match is None:
            break
        found.append(int(match[1], 16))
    return bytes(reversed(found))


def _bytes(spelled: str) -> bytes:
    """The bytes that letters stand for; others, which are text of an added token, end a character."""
    return bytes(LETTERS.get(letter, 0x20) for letter in spelled)


def _unfinished(raw: bytes) -> int:
    """Bytes at the end that begin a character of UTF-8 and do not end it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(raw)
    return len(decoder.getstate()[0])
