"""One more token for every row, on one GPU, without the host: attention by the decode kernels, the choice of tokens, and the next step's
inputs. Nothing in it waits or depends on the host, so that it can be captured in a CUDA graph once and replayed for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.cache import Prefix
from dropkv.decode.fused import fused_layers
from dropkv.decode.kernel_run import KernelRun, line, log, usable
from dropkv.decode.sampling import choose
from dropkv.decode.tails import Tails
from dropkv.models import Model


@dataclass(frozen=True)
class RowState:
    """Where a row stands: its newest token, which is not in its tail, and the tokens that are; numbers of its sampling, and how many of them
    have been used."""

    prefix: Prefix
    token: int
    length: int
    temperature: float = 0.0
    top_p: float = 1.0
    drawn: Tensor | None = None
    used: int = 0


class Flight:
    """The tokens of a step on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens.to("cpu", non_blocking=True) if tokens.is_cuda else tokens.clone()
        self._there = torch.cuda.Event() if tokens.is_cuda else None  # type: ignore[no-untyped-call]
        if self._there is not None:
            self._there.record(torch.cuda.current_stream(tokens.device))

    def tokens(self) -> list[int]:
        """One for each row, once the step is done."""
        if self._there is not None:
            self._there.synchronize()
        return [int(token) for token in self._tokens.tolist()]


class Step:
    """A decode step of so many rows (a bucket) of a batch. sampled: rows may be sampled, else all are greedy."""

    def __init__(self, model: Model, tails: Tails, prefixes: Sequence[Prefix], rows: int, *, sampled: bool) -> None:
        device = model.device
        self.model, self.rows, self.sampled = model, rows, sampled
        self.prefixes = tuple(prefixes)
        self.run = KernelRun(model, tails, prefixes, rows)
        self._last = tails.capacity - 1
        self._token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._going = torch.zeros(rows, dtype=torch.int32, device=device)
        self._warmth = torch.zeros((2, rows), dtype=torch.float64, device=device)
        self._drawn = torch.zeros((rows, tails.capacity if sampled else 1), dtype=torch.float64, device=device)
        self._used = torch.zeros(rows, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        self.logits: Tensor | None = None  # of the latest step, float32 [rows, vocabulary]

    def place(self, states: Sequence[RowState | None]) -> None:
        """The rows from here on, None for one without a question. Everything launched before must have been collected."""
        given = [state for state in states if state is not None]
        filled = [state or RowState(given[0].prefix, 0, 0) for state in states]
        self.run.layout.place_rows([state.prefix for state in filled])
        count = slice(0, len(filled))
        numbers = [[int(state is not None), one.length] for state, one in zip(states, filled, strict=True)]
        self._going.zero_()
        self.run.lengths.zero_()
        going, lengths = torch.tensor(numbers, dtype=torch.int32).T
        self._going[count], self.run.lengths[count] = going, lengths
        self._token[count] = torch.tensor([state.token for state in filled])
        if self.sampled:
            self._warmth[:, count] = torch.tensor(
                [[one.temperature, one.top_p] for one in filled], dtype=torch.float64
            ).T
            self._used[count] = torch.tensor([one.used for one in filled])
            for row, state in enumerate(filled):
                if state.drawn is not None:
                    self._drawn[row, : len(state.drawn)] = state.drawn

    def launch(self) -> Flight:
        """Begin the next token of every row; the host need not wait for it before it launches another.

        The first launch compiles what there is to compile. Raises KernelsUnusable when that cannot be done here, ModelError
        when a layer bypasses the run.
        """
        self._steps += 1
        with torch.inference_mode():
            if self._graph is None and self._steps == 2 and self.model.device.type == "cuda":
                self._capture()
            if self._graph is not None:
                self._graph.replay()
            elif self._steps == 1:
                usable(self.model, self._forward)
            else:
                self._forward()
        return Flight(self._token)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._forward()
        except RuntimeError as error:
            torch.cuda.synchronize(self.model.device)
            log.warning(
                "dropkv: decode steps of %s cannot be captured (%s): answers come more slowly",
                self.model.id,
                line(error),
            )
            return
        self._graph = graph

    def _forward(self) -> None:
        run = self.run
        run.seen = 0
        positions = (run.layout.starts + run.lengths).long().unsqueeze(0)
        with fused_layers(self.model, run):
            logits = run_logits(self.model.network, self._token.unsqueeze(0), positions, run, keep=0)[0]
        run.check(self.model)
        self.logits = logits
        if self.sampled:
            drawn = self._drawn.gather(1, self._used.unsqueeze(1)).squeeze(1)
            self._token.copy_(choose(logits, self._warmth[0], self._warmth[1], drawn))
            self._used.add_(self._going).clamp_(max=self._drawn.shape[1] - 1)
        else:
            self._token.copy_(logits.argmax(-1))
        run.lengths.add_(self._going).clamp_(max=self._last)
