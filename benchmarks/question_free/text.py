"""Runs of tokens that belong together, seen from the tokenizer and the document alone: words and numbers, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

How = Literal["max", "sum", "l2", "mean"]


@dataclass(frozen=True)
class Text:
    """A document's tokens in runs: int64 [n], the number of the run that each token is in.

    words: a token that starts with a letter or digit goes on with the one before it when that ends with one, so a number is one run also where
    its digits are tokens of their own. sentences: end after . ! ? or a line break.
    """

    words: Tensor
    sentences: Tensor

    @classmethod
    def of(cls, tokenizer: Any, ids: Sequence[int], device: torch.device) -> Text:
        """The runs of a document."""
        texts = {one: tokenizer.decode([one]) for one in set(ids)}
        pieces = [texts[one] for one in ids]
        words, sentences = [0], [0]
        for before, piece in pairwise(pieces):
            words.append(words[-1] + (not (before[-1:].isalnum() and piece[:1].isalnum())))
            ended = before.rstrip(" ")[-1:] in (".", "!", "?", "\n") and not piece[:1].isdigit()
            sentences.append(sentences[-1] + ended)
        return cls(torch.tensor(words, device=device), torch.tensor(sentences, device=device))


def pooled_in_runs(x: Tensor, runs: Tensor, how: How) -> Tensor:
    """x [..., n] >= 0 with every entry replaced by its run's largest value, sum, root of the sum of squares, or mean."""
    count = int(runs.max()) + 1
    index = runs.expand_as(x)
    whole = x.new_zeros((*x.shape[:-1], count))
    if how == "max":
        return whole.scatter_reduce(-1, index, x, "amax").gather(-1, index)
    whole = whole.scatter_add(-1, index, x.square() if how == "l2" else x)
    if how == "l2":
        whole = whole.sqrt()
    if how == "mean":
        whole = whole / torch.bincount(runs, minlength=count)
    return whole.gather(-1, index)
