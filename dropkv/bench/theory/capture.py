"""One prefill whose last queries are seen with everything they look at: the data of the theory bench.

A triple is (layer, query head, query): one query's probabilities over all keys it sees and the residuals of their values. Layers are handed on
as they are computed and forgotten, so at most one layer's keys and values are held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import LayerDone, run_decoder, sliced_layers
from dropkv.errors import ModelError
from dropkv.kernels.causal import causal_attention
from dropkv.models import LayerGeometry, Model
from dropkv.spans import Cuts, Span

SLICE = 2048  # tokens a layer computes at once


@dataclass(frozen=True)
class LayerView:
    """A layer's last m queries q [heads, m, d] with all keys k [kv_heads, n, d] and values v [kv_heads, n, d_v] after RoPE, in the model's dtype."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[0] // self.k.shape[0]

    def probabilities(self, head: int) -> Tensor:
        """p float64 [m, n] of one query head: exact causal attention of the last m positions."""
        m, n = self.q.shape[1], self.k.shape[1]
        logits = torch.mm(self.q[head].double() * self.scale, self.k[head // self.group].double().T)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        future = torch.ones(m, m, dtype=torch.bool, device=logits.device).triu_(1)
        logits[:, n - m :].masked_fill_(future, -torch.inf)
        return torch.softmax(logits, dim=-1)

    def residuals(self, head: int, p: Tensor) -> Tensor:
        """a - v_j float64 [n, d_v] for all keys j, a = sum_j p_j v_j, for one query's p [n]."""
        values = self.v[head // self.group].double()
        return torch.mv(values.T, p) - values


Visit = Callable[[LayerView], None]


class CaptureRun:
    """The run of the forward call: fills one layer's buffers slice by slice and hands full-attention layers to `visit` when they are done."""

    def __init__(self, geometry: Sequence[LayerGeometry], n: int, window: int) -> None:
        self.geometry = geometry
        self.n = n
        self.window = window
        self.visit: Visit = lambda view: None
        self._slice = Span(0, 0)
        self._kv: tuple[Tensor, Tensor] | None = None
        self._tail: list[Tensor] = []
        self._constants: tuple[float, float | None] = (1.0, None)

    def enter(self, layer: int, span: Span) -> None:
        """A layer is about to compute a slice."""
        self._slice = span

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Store the slice's k and v and its share of the last queries; gives its attention outputs."""
        start, stop = self._slice.start, self._slice.stop
        if self._kv is None:
            self._kv = (k.new_empty(k.shape[1], self.n, k.shape[3]), v.new_empty(v.shape[1], self.n, v.shape[3]))
        keys, values = self._kv
        keys[:, start:stop] = k[0]
        values[:, start:stop] = v[0]
        self._constants = (scale, softcap)
        first = self.n - self.window
        if stop > first:
            self._tail.append(q[0, :, max(0, first - start) :].clone())
        if layer == len(self.geometry) - 1:
            raise LayerDone  # nothing follows the last layer
        geometry = self.geometry[layer]
        reach = geometry.window if geometry.kind == "sliding" else None
        return causal_attention(q[0], keys[:, :stop], values[:, :stop], scale=scale, reach=reach, softcap=softcap)[None]

    def leave(self, layer: int) -> None:
        """All slices of a layer have run."""
        if self._kv is None:
            raise ModelError(f"layer {layer} did not hand its attention to dropkv: use another model")
        if self.geometry[layer].kind == "full":
            scale, softcap = self._constants
            self.visit(LayerView(layer, torch.cat(self._tail, dim=1), *self._kv, scale, softcap))
        self._kv, self._tail = None, []


def capture(model: Model, ids: Sequence[int], window: int, visit: Visit) -> None:
    """Read `ids` (template head included) once; `visit` gets every full-attention layer with its last `window` queries. Raises ModelError."""
    n = len(ids)
    run = CaptureRun(model.geometry, n, window)
    run.visit = visit
    tokens = torch.tensor([list(ids)], device=model.device)
    positions = torch.arange(n, device=model.device).unsqueeze(0)
    with torch.inference_mode(), sliced_layers(model.network, Cuts(n, (), SLICE), run.enter, run.leave):
        run_decoder(model.network, tokens, positions, run)
