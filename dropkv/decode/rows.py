"""The run of one forward call over tokens of many rows: each row's new tokens see its prefix, its tail, and themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import run_logits
from dropkv.cache import Prefix
from dropkv.decode.tails import Tails
from dropkv.errors import ModelError
from dropkv.kernels.rows import over_own, over_prefix, over_tails, together
from dropkv.models import Model


@dataclass(frozen=True)
class Piece:
    """New tokens of one row: `before` tokens are in its tail already."""

    row: int
    prefix: Prefix
    before: int
    ids: Sequence[int]


class RowsRun:
    """New tokens of all rows stand one after another in one sequence; what a token sees is decided here, by row.

    Where every piece has one token and the rows are 0, 1, 2, ..., tails are read where they lie, for all rows at once.
    """

    def __init__(self, model: Model, tails: Tails, pieces: Sequence[Piece]) -> None:
        self.model = model
        self.tails = tails
        self.pieces = pieces
        self.seen = 0
        self.step = all(len(piece.ids) == 1 and piece.row == place for place, piece in enumerate(pieces))
        rows = [piece.row for piece in pieces for _ in piece.ids]
        places = [piece.before + offset for piece in pieces for offset in range(len(piece.ids))]
        positions = [piece.prefix.n + piece.before + offset for piece in pieces for offset in range(len(piece.ids))]
        self.positions = torch.tensor(positions)
        self._index = _Everywhere(torch.tensor([rows, places, positions]))
        by_prefix: dict[int, tuple[Prefix, list[int]]] = {}
        count = 0
        for piece in pieces:
            mine = by_prefix.setdefault(id(piece.prefix), (piece.prefix, []))[1]
            mine.extend(range(count, count + len(piece.ids)))
            count += len(piece.ids)
        self._prefixes = [(prefix, _Everywhere(torch.tensor(mine))) for prefix, mine in by_prefix.values()]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [1, heads, tokens, d_v] of the new tokens of all rows."""
        self.seen += 1
        geometry = self.model.geometry[layer]
        reach = geometry.window if geometry.kind == "sliding" else None
        rows, places, positions = self._index.on(q.device)
        self.tails.put(layer, rows, places, k[0], v[0])
        far, far_sums = self._over_prefixes(layer, q[0], positions, scale, softcap, reach)
        near, near_sums = self._over_tails(layer, q[0], places, scale, softcap, reach)
        return together(far, far_sums, near, near_sums)[None].to(q.dtype)

    def _over_prefixes(
        self, layer: int, q: Tensor, positions: Tensor, scale: float, softcap: float | None, reach: int | None
    ) -> tuple[Tensor, Tensor]:
        if len(self._prefixes) == 1:
            prefix, _ = self._prefixes[0]
            given = prefix.layers[layer], prefix.bounds[layer]
            return over_prefix(q, positions, *given, scale=scale, softcap=softcap, reach=reach)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:2], self.model.geometry[layer].d_v), dtype=wide)
        sums = q.new_empty(q.shape[:2], dtype=wide)
        for prefix, everywhere in self._prefixes:
            mine = everywhere.on(q.device)
            given = prefix.layers[layer], prefix.bounds[layer]
            out[:, mine], sums[:, mine] = over_prefix(
                q[:, mine], positions[mine], *given, scale=scale, softcap=softcap, reach=reach
            )
        return out, sums

    def _over_tails(
        self, layer: int, q: Tensor, places: Tensor, scale: float, softcap: float | None, reach: int | None
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.tails.keys[layer], self.tails.values[layer]
        if self.step:
            filled = max(piece.before for piece in self.pieces) + 1
            near = keys[: len(self.pieces), :, :filled], values[: len(self.pieces), :, :filled]
            return over_tails(q, *near, places + 1, scale=scale, softcap=softcap, reach=reach)
        outs, sums, start = [], [], 0
        for piece in self.pieces:
            stop, filled = start + len(piece.ids), piece.before + len(piece.ids)
            mine = keys[piece.row, :, :filled], values[piece.row, :, :filled]
            out, total = over_own(q[:, start:stop], *mine, scale=scale, softcap=softcap, reach=reach)
            outs.append(out)
            sums.append(total)
            start = stop
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


class _Everywhere:
    """A small tensor of the host on whatever device a layer asks for."""

    def __init__(self, value: Tensor) -> None:
        self._copies = {value.device: value}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


def forward_rows(model: Model, tails: Tails, pieces: Sequence[Piece]) -> Tensor:
    """Logits [pieces, vocabulary] behind each piece, whose tokens are put into the tails. float32 (float64 for a float64 model).

    Raises ModelError when a layer bypasses the run.
    """
    run = RowsRun(model, tails, pieces)
    ids = torch.tensor([[one for piece in pieces for one in piece.ids]], device=model.device)
    ends = torch.tensor([len(piece.ids) for piece in pieces]).cumsum(0) - 1
    with torch.inference_mode():
        logits = run_logits(model.network, ids, run.positions.unsqueeze(0).to(model.device), run, keep=ends)[0]
    if run.seen != len(model.geometry):
        raise ModelError(
            f"only {run.seen} of {len(model.geometry)} layers of {model.id} passed through dropkv: use another model"
        )
    return logits
