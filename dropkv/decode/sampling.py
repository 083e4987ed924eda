"""Choosing tokens, for one row or a batch, where the logits are.

A row's random numbers are drawn beforehand, on the CPU, from its own seed, one for each token. So a seed means the same on every device, and
what a row says depends on nothing else in its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dropkv.settings import Sampling


def draws(sampling: Sampling, count: int) -> Tensor:
    """Numbers in [0, 1), float64 [count], one for each token of an answer."""
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def choose(logits: Tensor, temperature: Tensor, top_p: Tensor, drawn: Tensor) -> Tensor:
    """Token ids int64 [rows] for logits [rows, vocabulary]: the likeliest where the temperature is 0, else from the top_p share of the
    tempered distribution, by where `drawn` falls in it. temperature, top_p, drawn: float64 [rows]."""
    greedy = logits.argmax(-1)
    warm = temperature.clamp(min=1e-9).unsqueeze(1)
    shares, ids = torch.softmax(logits.double() / warm, dim=-1).sort(dim=-1, descending=True, stable=True)
    before = shares.cumsum(-1) - shares
    shares = shares.masked_fill(before >= top_p.unsqueeze(1), 0)  # the likeliest token always stays
    line = shares.cumsum(-1)
    goal = drawn.unsqueeze(1) * line[:, -1:]
    last = ((shares > 0).sum(-1, keepdim=True) - 1).clamp(min=0)  # rows without a question may hold no numbers
    place = torch.minimum(torch.searchsorted(line, goal, right=True), last)
    return torch.where(temperature == 0, greedy, ids.gather(1, place).squeeze(1))


class Chooser:
    """Picks the tokens of one answer, one after another."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._greedy = sampling.temperature == 0
        self._drawn = torch.empty(0) if self._greedy else draws(sampling, sampling.max_new_tokens)
        self._count = 0

    def __call__(self, logits: Tensor) -> int:
        """The chosen id for logits [vocabulary]."""
        if self._greedy:
            return int(logits.argmax())
        given = (self._sampling.temperature, self._sampling.top_p, float(self._drawn[self._count]))
        self._count += 1
        return int(choose(logits.unsqueeze(0), *(logits.new_tensor([one], dtype=torch.float64) for one in given)))
