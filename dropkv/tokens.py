"""Token ids of pieces of a prompt: in template text special tokens are recognised, in foreign text they stay text."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from dropkv.errors import ModelError

ANCHOR = "\n"  # put before a piece, and taken off again, for tokenizers that would add a space to its start


class PieceEncoder:
    """Encodes pieces that will stand side by side, with a tokenizer of transformers; adds nothing at a piece's ends."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer = tokenizer
        self.name = name
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {index for index, token in added.items() if token.special}
        self.special_ids = frozenset(special.union(tokenizer.all_special_ids))
        # What a tokenizer cannot switch off: added tokens that are not special (<think>), and any of a slow tokenizer.
        # Added tokens that are ordinary text, such as runs of spaces, are left alone.
        fast = bool(getattr(tokenizer, "is_fast", False))
        marks = {token.content for token in added.values() if _is_mark(token.content) and not (fast and token.special)}
        longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
        self.marks = re.compile("|".join(map(re.escape, longest_first))) if marks else None
        self.fast = fast
        first = self._ids("x", special=False)
        self.adds_space = bool(first) and str(tokenizer.convert_ids_to_tokens(first[0])).startswith("\u2581")

    def template(self, text: str) -> list[int]:
        """Ids of text that a template wrote: its special tokens are special."""
        return self._joined(text, special=True)

    def before_foreign(self, text: str) -> tuple[list[int], bool]:
        """Ids of template text with foreign text right behind it, and whether that is to be encoded with `after_space`.

        A tokenizer that adds a space to the start of a text makes one token of it and the first word, so it gets the
        template's last one.
        """
        cut = self.adds_space and (not text or (text.endswith(" ") and not text.endswith("  ")))
        return self.template(text[:-1] if cut else text), cut

    def foreign(self, text: str, *, after_space: bool = False) -> list[int]:
        """Ids of text that somebody else wrote: what looks like a special token stays text.

        after_space: the space the tokenizer may add to the start stands for one that the text before it was cut of.
        """
        inside = [mark.start() + 1 for mark in self.marks.finditer(text)] if self.marks else []
        cuts = [0, *inside, len(text)]
        ids: list[int] = []
        for number, (start, stop) in enumerate(pairwise(cuts)):
            encode = self._ids if after_space and number == 0 else self._joined
            ids += encode(text[start:stop], special=False)
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if not (self.special_ids - {unknown}).isdisjoint(ids):
            raise ModelError(
                f"{self.name}: its tokenizer takes text for special tokens and cannot be told not to; "
                f"use a model with a fast tokenizer"
            )
        return ids

    def prefix(self) -> list[int]:
        """What the tokenizer puts before a plain text, usually one token, without what it puts after it."""
        ids = list(self.tokenizer("", verbose=False).input_ids)
        end = getattr(self.tokenizer, "eos_token_id", None)
        if ids and ids[-1] == end and (len(ids) > 1 or end != getattr(self.tokenizer, "bos_token_id", None)):
            ids.pop()
        return ids

    def _joined(self, text: str, *, special: bool) -> list[int]:
        if not self.adds_space:
            return self._ids(text, special=special)
        anchor, both = self._ids(ANCHOR, special=special), self._ids(ANCHOR + text, special=special)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else self._ids(text, special=special)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if not text:
            return []
        split = {"split_special_tokens": not special} if self.fast else {}
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False, **split).input_ids)


def _is_mark(text: str) -> bool:
    """Whether an added token looks like a mark (<think>, [INST], |x|) and not like ordinary text."""
    return len(text) > 2 and text[0] in "<[|{\uff5c" and text[-1] in ">]|}\uff5c"
