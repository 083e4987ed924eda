"""The run of forward calls whose attention the decode kernels compute: tables, scratch memory and launches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.cache import Prefix
from dropkv.decode.layout import Layout
from dropkv.decode.rows import Piece
from dropkv.decode.tails import Tails
from dropkv.errors import ModelError
from dropkv.kernels.fused_decode import begins_early, launch, tile_of
from dropkv.kernels.tail_put import put
from dropkv.models import Model

PROGRAMS = 132  # that run at the same time: the multiprocessors of an H200
SMALL = 32  # queries of a tile whose programs are so small that twice as many run
LEAST = 16  # chunks of a layer's prefix


log = logging.getLogger("dropkv")
Result = TypeVar("Result")


class KernelsUnusable(Exception):
    """The kernels cannot be compiled or run here, which has been said on standard error; the plain run can take over."""


def usable(model: Model, action: Callable[[], Result]) -> Result:
    """What an action that needs the kernels gives. Raises KernelsUnusable."""
    try:
        return action()
    except (torch.OutOfMemoryError, ModelError):
        raise
    except Exception as error:  # of many kinds: no compiler, an unknown GPU, too little shared memory
        log.warning("dropkv: decode kernels cannot be used (%s): answers of %s come more slowly", line(error), model.id)
        raise KernelsUnusable from error


def line(error: Exception) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


class KernelRun:
    """New tokens by the decode kernels, at most `rows` of them: one for each row of a step, or the tokens of several questions.

    slots, lengths int32 [rows]: the tail that a token belongs to, and the tokens in it before that one. A step has its rows' own tails.
    """

    def __init__(self, model: Model, tails: Tails, prefixes: Sequence[Prefix], rows: int) -> None:
        self.geometry = model.geometry
        self.tails = tails
        device, shape = model.device, model.geometry[0]
        group, heads = shape.query_heads // shape.kv_heads, shape.query_heads
        tile = tile_of(max(one.d_k for one in model.geometry), model.dtype.itemsize)
        tiles = -(-rows * group // tile)
        most = 2 * PROGRAMS if rows * group <= SMALL else max(LEAST, PROGRAMS // tiles)
        self.layout = Layout(prefixes, device, rows, most=most, tile=tile)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.seen = 0
        self.early = begins_early(device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and not self.early else None  # type: ignore[no-untyped-call]
        self.pending: Tensor | None = None  # what a fused layer leaves to the next one to add to the residual stream
        chunks = max(one.shape[1] for one in self.layout.chunks)
        splits = max(1, min(8, 4 * PROGRAMS // (rows * shape.kv_heads), tails.capacity // 64))
        d_v = max(one.d_v for one in model.geometry)

        def scratch(*size: int) -> tuple[Tensor, Tensor]:
            sums = torch.full(size, -torch.inf, dtype=torch.float32, device=device)
            return torch.zeros((*size, d_v), dtype=model.dtype, device=device), sums

        self.scratch = *scratch(chunks, rows, group), *scratch(splits, rows, heads)
        self.out = torch.zeros((rows, heads, d_v), dtype=model.dtype, device=device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [1, heads, tokens, d_v] of the new tokens."""
        news = k[0].transpose(0, 1), v[0].transpose(0, 1)
        put(*news, self.tails.keys[layer], self.tails.values[layer], self.slots, self.lengths)
        return self.over(layer, q[0].transpose(0, 1), scale, softcap).transpose(0, 1)[None]

    def over(self, layer: int, q: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention outputs [tokens, heads, d_v] of q [tokens, heads, d] over prefixes and tails, which have the new tokens already."""
        self.seen += 1
        layout, shape = self.layout, self.geometry[layer]
        return launch(
            q, self.tails.keys[layer], self.tails.values[layer], self.slots, self.lengths, layout.starts, layout.tables[layer],
            layout.chunks[layer], layout.heads[layer], layout.tiles, layout.order, layout.whose, self.scratch, self.out[: len(q)],
            scale=scale, softcap=softcap, reach=shape.window if shape.kind == "sliding" else None, tile=layout.tile,
            per_head=layout.per_head,
            early=self.early, side=self._side,
        )  # fmt: skip

    def read(self, model: Model, pieces: Sequence[Piece]) -> Tensor:
        """Logits [pieces, vocabulary] behind each piece, whose tokens, at most `rows` in all, are put into the tails: `rows.forward_rows` by
        the kernels."""
        tokens = [(piece, offset) for piece in pieces for offset in range(len(piece.ids))]
        count = slice(0, len(tokens))
        self.layout.place_rows([piece.prefix for piece, _ in tokens])
        self.slots[count] = torch.tensor([piece.row for piece, _ in tokens], dtype=torch.int32)
        self.lengths[count] = torch.tensor([piece.before + offset for piece, offset in tokens], dtype=torch.int32)
        ids = torch.tensor([[piece.ids[offset] for piece, offset in tokens]], device=model.device)
        positions = (self.layout.starts + self.lengths)[count].long().unsqueeze(0)
        ends = torch.tensor([len(piece.ids) for piece in pieces]).cumsum(0) - 1
        self.seen = 0
        with torch.inference_mode():
            logits = run_logits(model.network, ids, positions, self, keep=ends)[0]
        self.check(model)
        return logits

    def check(self, model: Model) -> None:
        """Raise ModelError unless every layer has come by."""
        if self.seen != len(self.geometry):
            raise ModelError(
                f"only {self.seen} of {len(self.geometry)} layers of {model.id} passed through dropkv: use another model"
            )
