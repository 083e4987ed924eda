"""Answers from kept entries themselves, which may be changed or weighed, in place of masks over the full cache. Plain attention in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.models import Model


@dataclass(frozen=True)
class Entries:
    """What one answer sees of a document: per layer keys and values [kv_heads, p, d] and what is added to their logits, float32
    [kv_heads, G or 1, p], -inf where a head has fewer entries than p."""

    keys: list[Tensor]
    values: list[Tensor]
    bias: list[Tensor]

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor], keep: Tensor) -> Entries:
        """Those of a full cache [kv_heads, n, d] per layer that a mask keeps, bool [layers, kv_heads, n], in the order of the document."""
        return cls(list(keys), list(values), [x.new_zeros((len(x), 1, x.shape[1])) for x in keys]).kept(keep)

    @property
    def counts(self) -> int:
        """How many there are in all layers and heads."""
        return sum(int((bias[:, 0] > -torch.inf).sum()) for bias in self.bias)

    def kept(self, keep: Tensor | Sequence[Tensor]) -> Entries:
        """Only those that a mask keeps, bool [kv_heads, p] for every layer."""
        found = Entries([], [], [])
        for keys, values, bias, mask in zip(self.keys, self.values, self.bias, keep, strict=True):
            most = int(mask.sum(-1).max())
            order = (~mask).int().argsort(dim=-1, stable=True)[:, :most]  # kept ones first, as they stand
            at = order.unsqueeze(-1)
            found.keys.append(keys.gather(1, at.expand(-1, -1, keys.shape[-1])))
            found.values.append(values.gather(1, at.expand(-1, -1, values.shape[-1])))
            weighed = bias.masked_fill(~mask.unsqueeze(1), -torch.inf)
            found.bias.append(weighed.gather(2, order.unsqueeze(1).expand(-1, bias.shape[1], -1)))
        return found

    def weighed(self, bias: Sequence[Tensor]) -> Entries:
        """With these numbers added to the logits of all entries, [kv_heads, G] for every layer."""
        return replace(self, bias=[old + new.unsqueeze(-1) for old, new in zip(self.bias, bias, strict=True)])

    def with_one_more(self, keys: Sequence[Tensor], values: Sequence[Tensor], bias: Sequence[Tensor]) -> Entries:
        """One more entry for every head: keys and values [kv_heads, d] and bias [kv_heads] for every layer."""
        more = zip(self.bias, bias, strict=True)
        return Entries(
            [torch.cat([old, new.unsqueeze(1)], 1) for old, new in zip(self.keys, keys, strict=True)],
            [torch.cat([old, new.unsqueeze(1)], 1) for old, new in zip(self.values, values, strict=True)],
            [torch.cat([old, new.view(-1, 1, 1).expand(-1, old.shape[1], 1)], 2) for old, new in more],
        )


class EntriesRun:
    """The run of answers to one question, a row for each of `rows`; all rows read the same number of tokens at a time.

    group: query heads of a KV head. watched: a row whose tokens' attention to its entries is collected in `paid`, per layer the largest and the sum
    over the tokens of a step, [kv_heads, G, p] each.
    """

    def __init__(self, rows: Sequence[Entries], capacity: int, group: int, watched: int | None = None) -> None:
        layers = range(len(rows[0].keys))
        self.keys = [_padded([row.keys[layer] for row in rows], 1, 0.0) for layer in layers]
        self.values = [_padded([row.values[layer] for row in rows], 1, 0.0) for layer in layers]
        self.bias = [
            _padded([row.bias[layer].expand(-1, group, -1) for row in rows], 2, -torch.inf).unsqueeze(3)
            for layer in layers
        ]
        self.tails = [
            [x.new_zeros((len(rows), x.shape[1], capacity, x.shape[3])) for x in part]
            for part in (self.keys, self.values)
        ]
        self.filled = 0
        self.watched = watched
        self.paid: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [rows, heads, t, d_v]: entries, tokens before these, and these up to each."""
        if window is not None or softcap is not None:
            raise ValueError(
                "only layers with full attention and no cap of logits can be answered from changed entries"
            )
        rows, heads, t, _ = q.shape
        kv_heads = k.shape[1]
        stop = self.filled + t
        tail_keys, tail_values = (part[layer] for part in self.tails)
        tail_keys[:, :, self.filled : stop], tail_values[:, :, self.filled : stop] = k, v
        by_head = (rows, kv_heads, heads // kv_heads, t, -1)
        q = (q * scale).reshape(rows, kv_heads, -1, q.shape[-1])
        far = (q @ self.keys[layer].transpose(2, 3)).view(by_head) + self.bias[layer]
        near = (q @ tail_keys[:, :, :stop].transpose(2, 3)).view(by_head)
        near = near + torch.full((t, stop), -torch.inf).triu_(self.filled + 1)
        weights = torch.cat([far, near], -1).softmax(-1)
        split = far.shape[-1]
        if self.watched is not None:
            own = weights[self.watched, ..., :split]
            self.paid[layer] = own.amax(2), own.sum(2)
        weights = weights.view(rows, kv_heads, -1, weights.shape[-1])
        out = weights[..., :split] @ self.values[layer] + weights[..., split:] @ tail_values[:, :, :stop]
        return out.view(rows, heads, t, -1)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        at = torch.tensor(rows)
        for part in (self.keys, self.values, self.bias, *self.tails):
            for layer, x in enumerate(part):
                part[layer] = x[at]

    def going_on(self, row: int, entries: Sequence[Entries]) -> EntriesRun:
        """The run of rows that have read what `row` has read, and see these entries from now on."""
        capacity = self.tails[0][0].shape[2]
        run = EntriesRun(entries, capacity, self.bias[0].shape[2])
        run.tails = [[x[row : row + 1].repeat(len(entries), 1, 1, 1) for x in part] for part in self.tails]
        run.filled = self.filled
        return run


def _padded(parts: Sequence[Tensor], dim: int, fill: float) -> Tensor:
    """Tensors stacked that differ in the length of one dimension."""
    most = max(part.shape[dim] for part in parts)
    shape = list(parts[0].shape)
    shape[dim] = most
    whole = parts[0].new_full((len(parts), *shape), fill)
    for number, part in enumerate(parts):
        whole[number].narrow(dim, 0, part.shape[dim]).copy_(part)
    return whole


Enough = Callable[[Sequence[int]], bool]


def read_question(
    model: Model, rows: Sequence[Entries], tokens: Sequence[int], start: int, most: int, watched: int | None = None
) -> tuple[EntriesRun, Tensor]:
    """A run whose rows have read a question that begins at position `start`, with room for an answer of `most` tokens, and the tokens that each
    answer begins with, int64 [rows]. watched: a row whose attention is collected."""
    layer = model.geometry[0]
    run = EntriesRun(rows, len(tokens) + most, layer.query_heads // layer.kv_heads, watched)
    first = _step(model, run, torch.tensor([list(tokens)]).expand(len(rows), -1), start)
    run.watched = None
    return run, first


def answers_of(
    model: Model, run: EntriesRun, first: Tensor, position: int, most: int, enough: Enough | None = None
) -> list[list[int]]:
    """Greedy answers of at most so many tokens, without the stop token. first: what each begins with, at `position`; the run's rows are used
    up. enough: whether what follows an answer's tokens so far is of no interest."""
    answers: list[list[int]] = [[] for _ in first]
    present = list(range(len(first)))
    token = first
    for number in range(most):
        going = []
        for place, one in enumerate(token.tolist()):
            own = answers[present[place]]
            if one in model.stop_ids:
                continue
            own.append(one)
            if number + 1 < most and not (enough is not None and enough(own)):
                going.append(place)
        if not going:
            break
        if len(going) < len(present):
            run.select(going)
            present, token = [present[place] for place in going], token[going]
        token = _step(model, run, token.unsqueeze(1), position + number)
    return answers


def _step(model: Model, run: EntriesRun, ids: Tensor, start: int) -> Tensor:
    """The likeliest token behind ids [rows, t] that stand at `start` and after."""
    rows, t = ids.shape
    positions = torch.arange(start, start + t).expand(rows, -1)
    with torch.inference_mode():
        logits = run_logits(model.network, ids.contiguous(), positions.contiguous(), run)
    run.filled += t
    return logits[:, -1].argmax(-1)
