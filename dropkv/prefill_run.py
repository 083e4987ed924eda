"""The run of a prefill: what happens to the queries, keys and values of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from dropkv.attention import LayerDone, output_projection, rotation
from dropkv.clock import Clock
from dropkv.errors import ModelError
from dropkv.kernels.causal import attend_behind, causal_attention, fused_on_gpu
from dropkv.kernels.probe import probe_attention
from dropkv.kernels.score import Observed
from dropkv.methods import Gathered, LayerContext, LayerScores, Method, observe_all, observed_by, score_all
from dropkv.models import LayerGeometry
from dropkv.observers import Observation, Probe
from dropkv.queries import Queries
from dropkv.replays import FusedProbes
from dropkv.rope import Regime
from dropkv.spans import Span, range_of
from dropkv.told import weights

Progress = Callable[[int, int], None]


class Reader(Protocol):
    """Takes in the layers of one prefill, in order. `methods`: those whose scores it wants, as the observer leaves them."""

    methods: Sequence[Method]

    def full(self, layer: int, context: LayerContext, scores: Sequence[LayerScores]) -> None:
        """A layer with full attention and its scores, one for each of `methods`. The context's k and v are buffers that the next layer
        overwrites: copy what is kept."""
        ...

    def sliding(self, layer: int, k: Tensor, v: Tensor) -> None:
        """A layer with sliding attention: k and v [kv_heads, n, d], buffers as well. It has no scores."""
        ...


class PrefillRun:
    """The run that travels with the forward call: holds the current layer's buffers, observes, and hands finished layers to the reader."""

    def __init__(
        self,
        network: nn.Module,
        geometry: Sequence[LayerGeometry],
        n: int,
        observation: Observation,
        reader: Reader,
        seeds: Sequence[int],
        progress: Progress | None,
        regime: Regime,
        *,
        fused: bool | None = None,
        told: Tensor | None = None,
    ) -> None:
        self.network = network
        self.geometry = geometry
        self.n = n
        self.observation = observation
        self.reader = reader
        self.methods = tuple(reader.methods)
        self.seeds = tuple(seeds)
        self.progress = progress
        self.regime = regime
        self._weighed: dict[object, Tensor] = {}
        self.told = told  # nats [documents, n], where replays' queries weigh them
        self.done = 0
        self.scoring, self.holding = Clock(), Clock()
        self._needs = frozenset[str]().union(*(method.needs for method in self.methods))
        self._fused = FusedProbes(self.methods, forced=fused)
        self._span = Span(0, 0)
        self._seen: set[int] = set()
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._constants: tuple[float, float | None] = (1.0, None)
        self._forget()

    def _forget(self) -> None:
        """What belongs to one layer alone starts anew."""
        self._queries = Queries(self.n, self.observation.window, self._needs)
        self._gathered = {observed_by(method): Gathered() for method in self.methods}
        self._context: LayerContext | None = None

    def enter(self, layer: int, span: Span) -> None:
        """A layer is about to compute a span."""
        self._span = span
        if self._holding and self._k is not None:
            self.holding.start(self._k.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Store the slice's k and v, observe with its q where that is asked, and give its attention outputs."""
        if q.shape[0] != len(self.seeds):
            raise ModelError(f"the prefill of {len(self.seeds)} documents was called with a batch of {q.shape[0]}")
        self._seen.add(layer)
        self._constants = (scale, softcap)
        reach = self._reach(layer, window)
        queries, keys, values = (part.flatten(0, 1) for part in (q, k, v))
        if self._span.probes:
            out = self._probes(layer, queries, keys, values, reach)
            return out.view(*q.shape[:2], *out.shape[1:])
        start, stop = self._span.start, self._span.stop
        buffer_k, buffer_v = self._buffers(keys, values)
        buffer_k[:, start:stop] = keys
        buffer_v[:, start:stop] = values
        if self.geometry[layer].kind == "full":
            with self.scoring.part(q.device):
                self._queries.add(queries, buffer_k[:, :stop], scale, softcap, partial(self._rotation, layer))
        if layer == len(self.geometry) - 1:
            raise LayerDone  # nothing follows: keys, values and queries are all that is needed
        out = causal_attention(
            queries, buffer_k[:, :stop], buffer_v[:, :stop], scale=scale, reach=reach, softcap=softcap
        )
        return out.view(*q.shape[:2], *out.shape[1:])

    def leave(self, layer: int) -> None:
        """All slices of a layer have run: score it, hand it over, and free the buffers for the next layer."""
        if layer not in self._seen or self._k is None or self._v is None:
            raise ModelError(f"layer {layer} did not hand its attention to dropkv: use another model")
        if self._holding:
            self.holding.stop(self._k.device)
        with self.scoring.part(self._k.device):
            self._hand_over(layer, self._k[:, : self.n], self._v[:, : self.n])
        if self._holding and layer == len(self.geometry) - 1:
            self.holding.start(self._k.device)  # what follows the layers is done for the held-out text alone
        self.done += 1
        self._forget()
        if layer + 1 < len(self.geometry) and self.geometry[layer + 1] != self.geometry[layer]:
            self._k = self._v = None
        if self.progress is not None:
            self.progress(layer + 1, len(self.geometry))

    def _hand_over(self, layer: int, k: Tensor, v: Tensor) -> None:
        if not _finite(k, v):
            raise ModelError(
                f"layer {layer} computed keys or values that are not finite: nothing was written, use another --dtype"
            )
        if self.geometry[layer].kind == "sliding":
            self.reader.sliding(layer, k, v)
            return
        context = self._observed_context(layer)
        found = {key: gathered.scores() for key, gathered in self._gathered.items()}
        scores = score_all(self.methods, context, [found[observed_by(method)] for method in self.methods])
        if scores and not bool(torch.isfinite(torch.stack([one.raw for one in scores])).all()):
            raise ModelError(f"layer {layer} has scores that are not finite: nothing was written, use another --dtype")
        self.reader.full(layer, context, scores)

    @property
    def _holding(self) -> bool:
        """Whether the current span is the held-out text; it is the last one of a layer."""
        return any(probe.observing == 0 for probe in self._span.probes)

    def _probes(self, layer: int, q: Tensor, k: Tensor, v: Tensor, reach: int | None) -> Tensor:
        """Attention of the span's probes over the document keys they see and themselves; what they contribute goes into the layer's scores."""
        scale, softcap = self._constants
        document_k, document_v = (part[:, : self.n] for part in self._buffers(k, v))
        if self._holding:  # in the last layer too: predictions follow
            if reach is None and softcap is None and fused_on_gpu(q, v):
                return attend_behind(q, document_k, document_v, k, v, scale)
            return self._probe(layer, self._span.probes, q, k, v, reach)
        with self.scoring.part(q.device):
            if self._fused.serve(self.geometry[layer], self._span, q, softcap):
                told = self._weights(self._span.probes, len(k), q.device, side_by_side=True)
                out, scores = self._fused.attend(self._span, q, document_k, document_v, k, v, scale, told)
                self._gather(scores, 0)
            else:
                out = self._by_shape(layer, q, k, v, reach)
        if layer == len(self.geometry) - 1:
            raise LayerDone
        return out

    def _by_shape(self, layer: int, q: Tensor, k: Tensor, v: Tensor, reach: int | None) -> Tensor:
        """Each probe of the span by itself; neighbours of one shape at once where several documents are read together. Those are short, while for
        a long one memory was planned for one probe at a time."""
        outputs, start = [], 0
        for probes in _runs(self._span.probes, together=len(self.seeds) > 1 and reach is None):
            own = slice(start, start + sum(len(probe.ids) for probe in probes))
            outputs.append(self._probe(layer, probes, q[:, own], k[:, own], v[:, own], reach))
            start = own.stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _probe(self, layer: int, probes: Sequence[Probe], q: Tensor, k: Tensor, v: Tensor, reach: int | None) -> Tensor:
        """The same of probes of one shape, by the methods' own formulas; their heads stand one probe after another."""
        buffer_k, buffer_v = self._buffers(k, v)
        scale, softcap = self._constants
        count, first = len(probes), probes[0]
        columns = first.scored[1] - first.scored[0]
        keys, values = (
            torch.cat(
                [
                    torch.cat([*(buffer[:, start:stop] for start, stop in (probe.scored, *probe.seen)), own], dim=1)
                    for probe, own in zip(probes, new.chunk(count, 1), strict=True)
                ]
            )
            for buffer, new in ((buffer_k, k), (buffer_v, v))
        )
        positions = None
        if reach is not None:
            places = [*range_of((first.scored, *first.seen)), *range(self.n, self.n + q.shape[1])]
            positions = torch.tensor(places, device=q.device)
        methods = [method for method in self.methods if method.observed is not None]
        wanted = bool(methods) and self.geometry[layer].kind == "full" and not self._holding
        projected = wanted and any(method.projected for method in methods)

        def score(queries: Observed) -> list[LayerScores]:
            return observe_all(methods, queries, self._observed_context(layer), [probe.scored[0] for probe in probes])

        outputs, scores = probe_attention(
            torch.cat(q.chunk(count, 1)),
            keys,
            values,
            scale=scale,
            columns=columns,
            score=score if wanted else None,
            softcap=softcap,
            positions=positions,
            reach=reach,
            observing=first.observing,
            roots=self._observed_context(layer).roots.repeat(count, 1, 1, 1) if projected else None,
            told=self._weights(probes, len(k), k.device) if wanted else None,
        )
        self._gather(scores or (), first.scored[0], count)
        return torch.cat(outputs.chunk(count), 1)

    def _weights(
        self, probes: Sequence[Probe], kv_heads: int, device: torch.device, *, side_by_side: bool = False
    ) -> Tensor | None:
        """What the probes' queries weigh, for their heads one probe after another [probes * kv_heads, tokens], or their tokens side by side
        [kv_heads, tokens of all]; kv_heads: of all documents."""
        if self.told is None:
            return None
        key = (probes[0].scored, len(probes), kv_heads, device, side_by_side)
        if key not in self._weighed:  # every layer asks again
            told = self.told.to(device).repeat_interleave(kv_heads // len(self.seeds), 0)
            self._weighed[key] = torch.cat([weights(told, probe) for probe in probes], int(side_by_side))
        return self._weighed[key]

    def _gather(self, scores: Sequence[LayerScores], first: int, count: int = 1) -> None:
        """Take in scores of the keys from `first` on, one for each method that observes; count: the probes whose heads they are."""
        observers = (method for method in self.methods if method.observed is not None)
        distinct = {observed_by(method): part for method, part in zip(observers, scores, strict=False)}
        for key, part in distinct.items():
            self._gathered[key].add(part if count == 1 else _side_by_side(part, count), first, self.n)

    def _observed_context(self, layer: int) -> LayerContext:
        """The layer as methods see it; its document slices have all run."""
        if self._context is None:
            assert self._k is not None and self._v is not None
            k, v = self._k[:, : self.n], self._v[:, : self.n]
            scale, softcap = self._constants
            geometry = self.geometry[layer]
            self._context = LayerContext(
                k,
                v,
                scale,
                softcap,
                q=self._queries.window(k, geometry.query_heads * len(self.seeds)),
                wo=lambda: output_projection(self.network, layer, geometry.query_heads * geometry.d_v),
                attention=self._queries.attention,
                expected=self._queries.expected(partial(self._rotation, layer)),
                seed=self.seeds[0] + layer,
                more_seeds=tuple(seed + layer for seed in self.seeds[1:]),
            )
        return self._context

    def _rotation(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions`; where others are rotated otherwise, those beyond the document's regime count as its last."""
        if self.regime.by_length:
            positions = positions.clamp(max=self.regime.up_to - 1)
        return rotation(self.network, layer, positions, self.n)

    def _buffers(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._k is None or self._v is None or self._k.device != k.device:
            self._k = k.new_empty((k.shape[0], self.n, k.shape[-1]))
            self._v = v.new_empty((v.shape[0], self.n, v.shape[-1]))
        return self._k, self._v

    def _reach(self, layer: int, window: int | None) -> int | None:
        """How far a layer sees back: what the geometry says must be what the layer itself says."""
        geometry = self.geometry[layer]
        reach = geometry.window if geometry.kind == "sliding" else None
        if reach is not None and window is not None and window != reach:
            raise ModelError(f"layer {layer} slides over {window} tokens, its config says {reach}: use another model")
        return reach


def _runs(probes: Sequence[Probe], *, together: bool) -> Iterator[Sequence[Probe]]:
    """Probes whose scored keys follow each other and that differ in nothing else but their ids; or all alone."""

    def shape(probe: Probe) -> object:
        return len(probe.ids), probe.scored[1] - probe.scored[0], probe.seen, probe.observing

    start = 0
    for stop in range(1, len(probes) + 1):
        last = probes[stop - 1]
        follows = together and stop < len(probes) and probes[stop].scored[0] == last.scored[1]
        if not follows or shape(probes[stop]) != shape(last):
            yield probes[start:stop]
            start = stop


def _side_by_side(scores: LayerScores, count: int) -> LayerScores:
    """Scores of so many probes whose heads stand one after another, as scores of all their keys."""
    beside = scores.beside
    return LayerScores(
        torch.cat(scores.raw.chunk(count), -1), None if beside is None else torch.cat(beside.chunk(count, 1), -1)
    )


def _finite(*parts: Tensor) -> bool:
    """Whether all numbers are finite: so when their sum is; else each is looked at, since sums can overflow. Asks the device once."""
    total = torch.stack([part.sum(dtype=torch.promote_types(part.dtype, torch.float32)) for part in parts]).sum()
    return bool(torch.isfinite(total)) or all(bool(torch.isfinite(part).all()) for part in parts)
