"""Runs of tokens that belong together, seen from the tokenizer's pieces alone: words and numbers, also where every digit is a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

LONGEST = 32  # tokens of a run; writing without spaces would make whole clauses of it
SPACE = "\u2581"  # how SentencePiece writes a space, which its decoders drop at the start of a text


@dataclass(frozen=True, eq=False)
class Words:
    """A document's n tokens in runs. own int64 [n]: the run of every token; members int64 [runs, longest]: the positions of each run, n where
    there is no more."""

    own: Tensor
    members: Tensor

    @classmethod
    def of(cls, tokenizer: Any, ids: Sequence[int], device: torch.device) -> Words:
        """The runs of a document of these token ids."""
        spelled = {one: piece(tokenizer, one) for one in set(ids)}
        return cls.made(runs([spelled[one] for one in ids]), device)

    @classmethod
    def alone(cls, n: int, device: torch.device) -> Words:
        """Every token by itself, where no tokenizer is known."""
        return cls.made(list(range(n)), device)

    @classmethod
    def made(cls, numbers: Sequence[int], device: torch.device) -> Words:
        """From the number of every token's run, which rise by 0 or 1."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        sizes = torch.bincount(own)
        starts = sizes.cumsum(0) - sizes
        line = torch.arange(int(sizes.max()))
        members = torch.where(line < sizes.unsqueeze(1), starts.unsqueeze(1) + line, len(own))
        return cls(own.to(device), members.to(device))

    def sums(self, x: Tensor) -> Tensor:
        """x [..., n] with every entry replaced by the sum over its run. Nothing is added up by atomics: equal inputs, equal sums."""
        padded = torch.cat([x, x.new_zeros((*x.shape[:-1], 1))], -1)
        return padded[..., self.members].sum(-1)[..., self.own]


def runs(pieces: Sequence[str]) -> list[int]:
    """The number of the run of every piece: a piece that starts with a letter or digit goes on with the one before it when that ends with
    one, up to LONGEST pieces."""
    numbers, length = [0], 1
    for before, here in pairwise(pieces):
        joins = before[-1:].isalnum() and here[:1].isalnum() and length < LONGEST
        length = length + 1 if joins else 1
        numbers.append(numbers[-1] + (not joins))
    return numbers


def piece(tokenizer: Any, token: int) -> str:
    """The text of one token, with the space it begins with."""
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    spelled = tokenizer.convert_ids_to_tokens(token)
    return " " + text if str(spelled).startswith(SPACE) and not text.startswith(" ") else text
