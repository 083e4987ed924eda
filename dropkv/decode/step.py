"""One more token for every row, on one GPU, without the host: attention by the decode kernels, the choice of tokens, and the next step's
inputs. Nothing in it waits or depends on the host, so that it can be captured in a CUDA graph once and replayed for every token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.cache import Prefix
from dropkv.decode.fused import fused_layers
from dropkv.decode.layout import Layout
from dropkv.decode.sampling import choose
from dropkv.decode.tails import Tails
from dropkv.errors import ModelError
from dropkv.kernels.fused_decode import launch, put, tile_of
from dropkv.models import Model

log = logging.getLogger("dropkv")

FEW, MANY = (
    264,
    66,
)  # chunks that a layer's prefix is cut into: two for each multiprocessor of an H200, or one for every two, so that ...
SPREAD = 8  # ... what chunks leave behind stays small once there are more rows than this
SPLITS = 512  # programs that tails are cut into, where rows are few


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


class KernelRun:
    """The run of a step: one new token for every row, [1, heads, rows, d], by the decode kernels."""

    def __init__(self, model: Model, tails: Tails, prefixes: Sequence[Prefix], rows: int) -> None:
        self.geometry = model.geometry
        self.tails = tails
        device, shape = model.device, model.geometry[0]
        count = FEW if rows <= SPREAD else MANY
        tile = tile_of(max(one.d_k for one in model.geometry), model.dtype.itemsize)
        self.layout = Layout(prefixes, device, rows, most=count, tile=tile)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.seen = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pending: Tensor | None = None  # what a fused layer leaves to the next one to add to the residual stream
        chunks = max(one.shape[1] for one in self.layout.chunks)
        splits = max(1, min(8, SPLITS // (rows * shape.kv_heads), tails.capacity // 64))
        group, heads = shape.query_heads // shape.kv_heads, shape.query_heads
        d_v = max(one.d_v for one in model.geometry)

        def scratch(*size: int) -> tuple[Tensor, Tensor]:
            sums = torch.full(size, -torch.inf, dtype=torch.float32, device=device)
            return torch.zeros((*size, d_v), dtype=torch.float32, device=device), sums

        self.scratch = *scratch(chunks, rows, group), *scratch(splits, rows, heads)
        self.out = torch.zeros((rows, heads, d_v), dtype=model.dtype, device=device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [1, heads, rows, d_v] of one new token a row."""
        news = k[0].transpose(0, 1), v[0].transpose(0, 1)
        put(*news, self.tails.keys[layer], self.tails.values[layer], self.lengths)
        return self.over(layer, q[0].transpose(0, 1), scale, softcap).transpose(0, 1)[None]

    def over(self, layer: int, q: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention outputs [rows, heads, d_v] of q [rows, heads, d] over prefixes and tails, which have the new tokens already."""
        self.seen += 1
        layout, shape = self.layout, self.geometry[layer]
        return launch(
            q, self.tails.keys[layer], self.tails.values[layer], self.lengths, layout.starts, layout.tables[layer],
            layout.chunks[layer], layout.heads[layer], layout.tiles, layout.order, layout.whose, self.scratch, self.out,
            scale=scale, softcap=softcap, reach=shape.window if shape.kind == "sliding" else None, tile=layout.tile,
            per_head=layout.per_head,
            side=self._side,
        )  # fmt: skip


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


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


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

        The first launch compiles what there is to compile. Raises ModelError when that cannot be done here, or a layer bypasses the run.
        """
        self._steps += 1
        with torch.inference_mode():
            if self._graph is None and self._steps == 2 and self.model.device.type == "cuda":
                self._capture()
            if self._graph is not None:
                self._graph.replay()
            elif self._steps == 1:
                self._first()
            else:
                self._forward()
        return Flight(self._token)

    def _first(self) -> None:
        try:
            self._forward()
        except (torch.OutOfMemoryError, ModelError):
            raise
        except Exception as error:  # of many kinds: no compiler, an unknown GPU, too little shared memory
            raise ModelError(f"decode kernels cannot be used ({_line(error)})") from error

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
                _line(error),
            )
            return
        self._graph = graph

    def _forward(self) -> None:
        run = self.run
        run.seen = 0
        positions = (run.layout.starts + run.lengths).long().unsqueeze(0)
        with fused_layers(self.model, run):
            logits = run_logits(self.model.network, self._token.unsqueeze(0), positions, run, keep=0)[0]
        if run.seen != len(run.geometry):
            raise ModelError(
                f"only {run.seen} of {len(run.geometry)} layers of {self.model.id} passed through dropkv: use another model"
            )
        self.logits = logits
        if self.sampled:
            drawn = self._drawn.gather(1, self._used.unsqueeze(1)).squeeze(1)
            self._token.copy_(choose(logits, self._warmth[0], self._warmth[1], drawn))
            self._used.add_(self._going).clamp_(max=self._drawn.shape[1] - 1)
        else:
            self._token.copy_(logits.argmax(-1))
        run.lengths.add_(self._going).clamp_(max=self._last)
