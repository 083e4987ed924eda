"""Runs of tokens that belong together, seen from the tokenizer and the document alone: words and numbers, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from dropkv.words import piece, runs

How = Literal["max", "sum", "l2", "mean"]


@dataclass(frozen=True)
class Text:
    """A document's tokens in runs: int64 [n], the number of the run that each token is in; of several documents [documents, 1, 1, n].

    words: those of `dropkv.words`, so a number is one run also where its digits are tokens of their own. sentences: end after . ! ? or a
    line break.
    """

    words: Tensor
    sentences: Tensor

    @classmethod
    def of(cls, tokenizer: Any, ids: Sequence[int], device: torch.device) -> Text:
        """The runs of a document."""
        texts = {one: piece(tokenizer, one) for one in set(ids)}
        pieces = [texts[one] for one in ids]
        sentences = [0]
        for before, here in pairwise(pieces):
            ended = before.rstrip(" ")[-1:] in (".", "!", "?", "\n") and not here[:1].isdigit()
            sentences.append(sentences[-1] + ended)
        return cls(torch.tensor(runs(pieces), device=device), torch.tensor(sentences, device=device))

    @classmethod
    def of_all(cls, tokenizer: Any, documents: Sequence[Sequence[int]], device: torch.device) -> Text:
        """The runs of documents of one length."""
        home = torch.device("cpu")
        texts = [cls.of(tokenizer, ids, home) for ids in documents]
        words, sentences = (torch.stack([getattr(text, kind) for text in texts]) for kind in ("words", "sentences"))
        return cls(*(one[:, None, None].to(device) for one in (words, sentences)))


def pooled_in_runs(x: Tensor, runs: Tensor, how: How) -> Tensor:
    """x [..., n] >= 0 with every entry replaced by its run's largest value, sum, root of the sum of squares, or mean."""
    index = runs.expand_as(x)
    whole = torch.zeros_like(x)  # there are no more runs than tokens
    if how == "max":
        return whole.scatter_reduce(-1, index, x, "amax").gather(-1, index)
    whole = whole.scatter_add(-1, index, x.square() if how == "l2" else x)
    if how == "l2":
        whole = whole.sqrt()
    if how == "mean":
        whole = whole / torch.zeros_like(x).scatter_add(-1, index, torch.ones_like(x)).clamp(min=1)
    return whole.gather(-1, index)
