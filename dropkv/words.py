"""Runs of tokens that belong together, seen from the tokenizer's pieces alone: words and numbers, also where every digit is a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

LONGEST = 32  # tokens of a run; writing without spaces would make whole clauses of it
LENGTHS = (1, 8, LONGEST)  # runs are added up with those of like length: most are short
SPACE = "\u2581"  # how SentencePiece writes a space, which its decoders drop at the start of a text


@dataclass(frozen=True, eq=False)
class Words:
    """A document's n tokens in runs. own int64 [n]: the run of every token. members: of runs of up to 1, 8 and LONGEST tokens, where there are
    any, int64 [runs, longest], the positions of each, n where there is no more; place int64 [n]: where these have every token's run."""

    own: Tensor
    members: tuple[Tensor, ...]
    place: Tensor

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
        members: list[Tensor] = []
        places, most, shorter = torch.empty_like(sizes), int(sizes.max()), 0
        for longest in LENGTHS:
            some = ((sizes > shorter) & (sizes <= longest)).nonzero()[:, 0]
            places[some] = sum(map(len, members)) + torch.arange(len(some))
            if len(some):
                line = torch.arange(min(longest, most))
                found = starts[some].unsqueeze(1) + line
                members.append(torch.where(line < sizes[some].unsqueeze(1), found, len(own)))
            shorter = longest
        return cls(own, tuple(members), places[own]).to(device)

    def to(self, device: torch.device) -> Words:
        """The same on a device."""
        return Words(self.own.to(device), tuple(own.to(device) for own in self.members), self.place.to(device))

    def sums(self, x: Tensor) -> Tensor:
        """x [..., n] with every entry replaced by the sum over its run. Nothing is added up by atomics: equal inputs, equal sums."""
        padded = torch.cat([x, x.new_zeros((*x.shape[:-1], 1))], -1)
        parts = [padded[..., own].sum(-1) if own.shape[1] > 1 else padded[..., own[:, 0]] for own in self.members]
        return torch.cat(parts, -1)[..., self.place]


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
