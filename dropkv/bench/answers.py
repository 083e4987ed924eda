"""Many answers at once from the caches of a few documents: every row has a document, a question and its own kept set.

For measuring accuracy only. Rows of one document share its full keys and values, and a kept set is a mask over them: all rows of a document
are the queries of one attention, so a hundred methods and budgets cost little more than one. A test checks that the answers are those
of the real, pruned cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.bench.masked_run import MaskedRun, any_rows
from dropkv.decode.fused import fits, fused_layers
from dropkv.models import Model

LOOK = 12  # decode steps between two looks at which answers have ended
WORTH = 0.05  # share of the rows that must have ended before the others are moved together

Decided = Callable[[int, Sequence[int]], bool]  # row, its tokens so far -> whether what follows them is of no interest


@dataclass(frozen=True)
class Row:
    """One answer to give: tokens appended behind document number `document`, and what is kept of it, bool [layers, kv_heads, n]."""

    document: int
    tokens: tuple[int, ...]
    keep: Tensor


def answer_rows(
    model: Model,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    rows: Sequence[Row],
    *,
    starts: Sequence[int],
    max_new_tokens: int,
    graphs: bool = True,
    decided: Decided | None = None,
    kernels: bool | None = None,
) -> list[list[int]]:
    """Greedy answers (token ids without the stop token) of all rows; those that `decided` says enough of may end early.

    keys, values: per layer [documents, kv_heads, n, d]. starts: per row, the position of its first token. Rows must name each document
    equally often, except where `any_rows`. kernels: as in `MaskedRun`. On a GPU the decode step is captured in a CUDA graph.
    """
    documents = keys[0].shape[0]
    order = sorted(range(len(rows)), key=lambda index: rows[index].document)
    counts = [0] * documents
    for row in rows:
        counts[row.document] += 1
    if len(set(counts)) > 1 and not (any_rows(model) if kernels is None else kernels):
        raise ValueError("every document needs the same number of rows")
    longest = max(len(row.tokens) for row in rows)
    keep = torch.stack([rows[index].keep for index in order]).to(model.device)  # [rows, layers, kv_heads, n]
    run = MaskedRun(model, keys, values, keep, longest + max_new_tokens, counts, kernels)
    ids = torch.zeros((len(rows), longest), dtype=torch.int64)
    positions = torch.zeros((len(rows), longest), dtype=torch.int64)
    for place, index in enumerate(order):
        tokens = rows[index].tokens
        pad = longest - len(tokens)
        ids[place, pad:] = torch.tensor(tokens)
        positions[place, pad:] = torch.arange(starts[index], starts[index] + len(tokens))
        run.hidden[place, :pad] = True
    run.expect(longest)
    with torch.inference_mode():
        logits = run_logits(model.network, ids.to(model.device), positions.to(model.device), run)
        run.advance(longest)
        first = logits[:, -1].argmax(-1, keepdim=True)
        position = positions[:, -1:].to(model.device) + 1
        known = None if decided is None else (lambda place, tokens: decided(order[place], tokens))
        decoding = Decoding(model, run, first, position, graphs and model.device.type == "cuda", known)
        produced = decoding.finish(max_new_tokens)
    answers: list[list[int]] = [[] for _ in rows]
    for index, chosen in zip(order, produced, strict=True):
        for one in chosen:
            if one in model.stop_ids:
                break
            answers[index].append(one)
    return answers


class Decoding:
    """The decode steps of a batch. Now and then rows that have ended are left out, so that few long answers do not cost as much as many."""

    def __init__(
        self,
        model: Model,
        run: MaskedRun,
        token: Tensor,
        position: Tensor,
        graphs: bool,
        decided: Decided | None = None,
    ) -> None:
        self.model, self.run, self.graphs, self.decided = model, run, graphs, decided
        self.fused = run.kernels and fits(model)
        self.stops = torch.tensor(sorted(model.stop_ids), device=model.device)
        self.token, self.position = token.clone(), position.clone()
        self.done = torch.isin(token, self.stops)  # [rows, 1]
        self.rows = torch.arange(len(token), device=model.device)  # which of the first rows the present ones are
        self.fresh = [token]  # tokens chosen since rows were last left out
        self.answers: list[list[int]] = [[] for _ in range(len(token))]

    def finish(self, count: int) -> list[list[int]]:
        """At most `count` tokens for every row, the first included; what follows a stop token is of no meaning."""
        number, filled = 1, int(self.run.filled)
        while number < count and not bool(self.done.all()):  # a look at the answers costs a wait, so only now and then
            if number > 1 and not self._leave_out():
                break
            steps = min(LOOK, count - number)
            self.run.expect(filled + number - 1 + steps)
            self._steps(steps)
            number += steps
        self._collect()
        return self.answers

    def _step(self) -> Tensor:
        network, run = self.model.network, self.run
        if not self.fused:
            return run_logits(network, self.token, self.position, run, widened=False)[:, -1].argmax(-1, keepdim=True)
        with fused_layers(self.model, run):  # rows stand where tokens of one text do
            logits = run_logits(network, self.token.T, self.position.T, run, keep=0, widened=False)[0]
        return logits.argmax(-1, keepdim=True)

    def _steps(self, count: int) -> None:
        graph: torch.cuda.CUDAGraph | None = None
        captured: Tensor | None = None
        for number in range(count):
            if self.graphs and number == 1 and count > 3:  # the first step has warmed everything up
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = self._step()
            if graph is not None and captured is not None:
                graph.replay()
                following = captured.clone()
            else:
                following = self._step()
            self.run.advance(1)
            self.position += 1
            self.token.copy_(following)
            self.fresh.append(following)
            self.done |= torch.isin(following, self.stops)

    def _leave_out(self) -> bool:
        """Go on with the rows that have not ended, and where documents need as many rows as others with some that have; False: all have."""
        self._collect()
        over = self.done.flatten().tolist()
        if self.decided is not None:
            rows = self.rows.tolist()
            over = [own or self.decided(row, self.answers[row]) for row, own in zip(rows, over, strict=True)]
        by_document, start = [], 0
        for count in self.run.counts:
            places = range(start, start + count)
            by_document.append(sorted(places, key=over.__getitem__))  # those that go on first
            start += count
        left = [sum(not over[place] for place in places) for places in by_document]
        if max(left) == 0:
            return False
        if sum(left) > (1 - WORTH) * len(over):
            return True
        if not self.run.kernels:
            left = [max(left)] * len(left)
        elif sum(left) == 1:  # a row alone would have kernels of its own compiled: one that has ended goes along
            left[next(number for number, places in enumerate(by_document) if len(places) > left[number])] += 1
        chosen = [place for places, count in zip(by_document, left, strict=True) for place in places[:count]]
        at = torch.tensor(chosen, device=self.token.device)
        self.run.select(at, left)
        self.token, self.position, self.rows = self.token[at], self.position[at], self.rows[at]
        self.done = torch.tensor([[over[place]] for place in chosen], device=at.device)
        return True

    def _collect(self) -> None:
        if self.fresh:
            for row, tokens in zip(self.rows.tolist(), torch.cat(self.fresh, dim=1).tolist(), strict=True):
                self.answers[row].extend(tokens)
        self.fresh = []
