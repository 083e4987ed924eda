"""Prefill, layer by layer and slice by slice: run, observe, score, keep, drop.

The sequence is [document; probes]. Inside one forward call of the decoder every layer first runs over the document's slices, filling one
buffer of keys and values, then over the probes; then the layer is scored and handed to a reader, which copies out what it keeps (in file
order), and the buffer is used again by the next layer. So at most one layer's full K and V lives beside the kept entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from dropkv.attention import LayerDone, output_projection, rotation, run_decoder, sliced_layers
from dropkv.budgets import Kept
from dropkv.errors import ModelError
from dropkv.kernels.causal import causal_attention
from dropkv.kernels.moments import Moments, rotate, unrotate
from dropkv.kernels.probe import probe_attention
from dropkv.kernels.score import Observed, Window, score_blocks
from dropkv.methods import Choice, Gathered, LayerContext, LayerScores, Method
from dropkv.models import LayerGeometry, Model
from dropkv.observers import Observation, Probe
from formats import LayerEntries

SLICE = 2048  # document tokens a layer computes at once
SINKS = 4  # the first tokens' queries are unlike all others, so no statistics are taken of them
FUTURE = 512  # positions behind the document over which queries to come are expected

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Span:
    """One slice of the sequence: document tokens, or exactly one probe."""

    start: int
    stop: int
    probe: Probe | None


@dataclass(frozen=True)
class Seconds:
    """Where the time of a prefill went."""

    prefill: float
    score: float


@dataclass(frozen=True)
class Prefilled:
    """What a prefill leaves behind: the kept entries of every layer, and where the time went (seconds)."""

    layers: tuple[LayerEntries, ...]
    prefill_seconds: float
    score_seconds: float


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


def plan_spans(n: int, probes: Sequence[Probe], size: int) -> tuple[Span, ...]:
    """Slices of at most `size` document tokens, then one per probe."""
    spans = [Span(start, min(n, start + size), None) for start in range(0, n, size)]
    for probe in probes:
        start = spans[-1].stop
        spans.append(Span(start, start + len(probe.ids), probe))
    return tuple(spans)


def prefill(
    model: Model,
    document: Sequence[int],
    observation: Observation,
    method: Method,
    kept: int,
    *,
    seed: int = 0,
    slice_tokens: int = SLICE,
    progress: Progress | None = None,
) -> Prefilled:
    """Read `document` (ids, template head included) once and keep `kept` entries per KV head as `method` says.

    Raises what `read` raises.
    """
    keeper = Keeper(method, kept, len(document), model.geometry)
    seconds = read(model, document, observation, keeper, seed=seed, slice_tokens=slice_tokens, progress=progress)
    return Prefilled(keeper.finish(), seconds.prefill, seconds.score)


def read(
    model: Model,
    document: Sequence[int],
    observation: Observation,
    reader: Reader,
    *,
    seed: int = 0,
    slice_tokens: int = SLICE,
    progress: Progress | None = None,
) -> Seconds:
    """Run the model over `document` (ids, template head included) and its probes once; every layer goes to `reader` with its scores.

    Probes are placed at position n, so n + observation.longest_probe must not exceed the model's positions (the caller checks).
    Raises ModelError when a layer of the network bypasses the seam, or when keys, values or scores are not finite.
    """
    n = len(document)
    spans = plan_spans(n, observation.probes, slice_tokens)
    sequence = list(document) + [token for probe in observation.probes for token in probe.ids]
    places = list(range(n)) + [n + offset for probe in observation.probes for offset in range(len(probe.ids))]
    ids = torch.tensor([sequence], device=model.device)
    positions = torch.tensor([places], device=model.device)
    run = PrefillRun(model.network, model.geometry, n, spans, observation, reader, seed, progress)
    started = time.perf_counter()
    with (
        torch.inference_mode(),
        sliced_layers(model.network, [(span.start, span.stop) for span in spans], run.enter, run.leave),
    ):
        run_decoder(model.network, ids, positions, run)
    _wait(model.device)
    if run.done != len(model.geometry):
        raise ModelError(
            f"only {run.done} of {len(model.geometry)} layers of {model.id} passed through dropkv: use another model"
        )
    return Seconds(time.perf_counter() - started - run.score_seconds, run.score_seconds)


class Keeper:
    """The reader of a compression: keeps entries by one method; rules that share entries among layers trim earlier layers as they go."""

    def __init__(self, method: Method, kept: int, n: int, geometry: Sequence[LayerGeometry]) -> None:
        self.methods: Sequence[Method] = (method,)
        self.geometry = geometry
        self._full = [index for index, layer in enumerate(geometry) if layer.kind == "full"]
        self._choice = Choice(
            method, n if method.keeps_all else kept, [geometry[index].kv_heads for index in self._full], n
        )
        self._layers: list[LayerEntries] = []

    def full(self, layer: int, context: LayerContext, scores: Sequence[LayerScores]) -> None:
        chosen = self._choice.add(scores[0])
        self._layers.append(take(context.k, context.v, chosen, scores[0].raw))
        if self._choice.shares:
            for index, counts in zip(self._full, self._choice.held(), strict=False):
                self._layers[index] = trim(self._layers[index], counts)

    def sliding(self, layer: int, k: Tensor, v: Tensor) -> None:
        newest = _newest(k, self.geometry[layer].window)
        self._layers.append(take(k, v, newest, torch.zeros(k.shape[:2], device=k.device)))

    def finish(self) -> tuple[LayerEntries, ...]:
        """The kept entries of every layer."""
        for index, chosen in zip(self._full, self._choice.finish(), strict=True):
            entries = trim(self._layers[index], chosen.counts)
            self._layers[index] = replace(entries, admit=chosen.admit.int())
        return tuple(self._layers)


class PrefillRun:
    """The run that travels with the forward call: holds the current layer's buffers, observes, and hands finished layers to the reader."""

    def __init__(
        self,
        network: nn.Module,
        geometry: Sequence[LayerGeometry],
        n: int,
        spans: Sequence[Span],
        observation: Observation,
        reader: Reader,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.network = network
        self.geometry = geometry
        self.n = n
        self.spans = spans
        self.observation = observation
        self.reader = reader
        self.methods = tuple(reader.methods)
        self.seed = seed
        self.progress = progress
        self.done = 0
        self.score_seconds = 0.0
        self._needs = frozenset[str]().union(*(method.needs for method in self.methods))
        self._span = spans[0]
        self._seen: set[int] = set()
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._constants: tuple[float, float | None] = (1.0, None)
        self._forget()

    def _forget(self) -> None:
        """What belongs to one layer alone starts anew."""
        self._tail: list[Tensor] = []
        self._gathered = [Gathered() for _ in self.methods]
        self._context: LayerContext | None = None
        self._attention: Tensor | None = None
        self._moments = Moments()

    def enter(self, layer: int, number: int) -> None:
        """A layer is about to compute slice `number`."""
        self._span = self.spans[number]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Store the slice's k and v, observe with its q where that is asked, and give its attention outputs."""
        if q.shape[0] != 1:
            raise ModelError(f"a prefill is one document at a time, the model was called with a batch of {q.shape[0]}")
        self._seen.add(layer)
        self._constants = (scale, softcap)
        reach = self._reach(layer, window)
        queries, keys, values = q[0], k[0], v[0]
        if self._span.probe is not None:
            return self._probe(layer, self._span.probe, queries, keys, values, reach)[None]
        start, stop = self._span.start, self._span.stop
        buffer_k, buffer_v = self._buffers(keys, values)
        buffer_k[:, start:stop] = keys
        buffer_v[:, start:stop] = values
        self._watch(layer, queries, buffer_k)
        if layer == len(self.geometry) - 1:
            raise LayerDone  # nothing follows: keys, values and queries are all that is needed
        return causal_attention(
            queries, buffer_k[:, :stop], buffer_v[:, :stop], scale=scale, reach=reach, softcap=softcap
        )[None]

    def leave(self, layer: int) -> None:
        """All slices of a layer have run: score it, hand it over, and free the buffers for the next layer."""
        if layer not in self._seen or self._k is None or self._v is None:
            raise ModelError(f"layer {layer} did not hand its attention to dropkv: use another model")
        started = time.perf_counter()
        geometry = self.geometry[layer]
        k, v = self._k[:, : self.n], self._v[:, : self.n]
        if not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise ModelError(
                f"layer {layer} computed keys or values that are not finite: nothing was written, use another --dtype"
            )
        if geometry.kind == "sliding":
            self.reader.sliding(layer, k, v)
        else:
            context = self._observed_context(layer)
            scores = [
                method.layer_scores(context, gathered.scores())
                for method, gathered in zip(self.methods, self._gathered, strict=True)
            ]
            if not all(bool(torch.isfinite(one.raw).all()) for one in scores):
                raise ModelError(
                    f"layer {layer} has scores that are not finite: nothing was written, use another --dtype"
                )
            self.reader.full(layer, context, scores)
        self.done += 1
        self._forget()
        if layer + 1 < len(self.geometry) and self.geometry[layer + 1] != geometry:
            self._k = self._v = None
        self.score_seconds += time.perf_counter() - started
        if self.progress is not None:
            self.progress(layer + 1, len(self.geometry))

    def _watch(self, layer: int, queries: Tensor, buffer_k: Tensor) -> None:
        """Keep of a slice's queries [heads, s, d] what the methods need once the layer is complete."""
        if self.geometry[layer].kind == "sliding":
            return
        start, stop = self._span.start, self._span.stop
        first = self.n - self.observation.window  # the tail's queries may lie in two slices
        if stop > first:
            self._tail.append(queries[:, max(0, first - start) :].clone())
        started = time.perf_counter()
        if "all queries" in self._needs:
            scale, softcap = self._constants
            keys = buffer_k[:, :stop]
            window = Window(_grouped(queries, len(keys)), keys, keys[..., :0], scale, softcap)
            received = score_blocks(window, lambda block: block.probability())
            if self._attention is None:
                self._attention = received.new_zeros((len(keys), self.n))
            self._attention[:, :stop] += received
        if "query statistics" in self._needs:
            skip = max(0, min(SINKS, self.n - 1) - start)
            line = torch.arange(start + skip, stop, device=queries.device)
            if len(line):
                self._moments.add(unrotate(queries[:, skip:], *rotation(self.network, layer, line)))
        self.score_seconds += time.perf_counter() - started

    def _probe(self, layer: int, probe: Probe, q: Tensor, k: Tensor, v: Tensor, reach: int | None) -> Tensor:
        """Attention of a probe's tokens over the document keys it sees and itself; their contributions go into the layer's scores."""
        buffer_k, buffer_v = self._buffers(k, v)
        scale, softcap = self._constants
        started = time.perf_counter()
        first, last = probe.scored
        keys = torch.cat([*(buffer_k[:, start:stop] for start, stop in (probe.scored, *probe.seen)), k], dim=1)
        values = torch.cat([*(buffer_v[:, start:stop] for start, stop in (probe.scored, *probe.seen)), v], dim=1)
        positions = None
        if reach is not None:
            places = [*range_of((probe.scored, *probe.seen)), *range(self.n, self.n + q.shape[1])]
            positions = torch.tensor(places, device=q.device)
        observers = [index for index, method in enumerate(self.methods) if method.observed is not None]
        wanted = bool(observers) and self.geometry[layer].kind == "full"
        projected = wanted and any(self.methods[index].projected for index in observers)

        def score(queries: Observed) -> list[LayerScores]:
            context = self._observed_context(layer)
            return [self.methods[index].observe(queries, context, first) for index in observers]

        outputs, scores = probe_attention(
            q,
            keys,
            values,
            scale=scale,
            columns=last - first,
            score=score if wanted else None,
            softcap=softcap,
            positions=positions,
            reach=reach,
            observing=probe.observing,
            roots=self._observed_context(layer).roots if projected else None,
        )
        for index, part in zip(observers, scores or (), strict=False):
            self._gathered[index].add(part, first, self.n)
        self.score_seconds += time.perf_counter() - started
        if layer == len(self.geometry) - 1:
            raise LayerDone
        return outputs

    def _observed_context(self, layer: int) -> LayerContext:
        """The layer as methods see it; its document slices have all run."""
        if self._context is None:
            assert self._k is not None and self._v is not None
            k, v = self._k[:, : self.n], self._v[:, : self.n]
            scale, softcap = self._constants
            geometry = self.geometry[layer]
            window = torch.cat(self._tail, dim=1) if self._tail else k.new_zeros((geometry.query_heads, 0, k.shape[-1]))
            self._context = LayerContext(
                k,
                v,
                scale,
                softcap,
                q=_grouped(window, len(k)),
                wo=lambda: output_projection(self.network, layer, geometry.query_heads * geometry.d_v),
                attention=self._attention,
                expected=self._expected(layer),
                seed=self.seed + layer,
            )
        return self._context

    def _expected(self, layer: int) -> Moments | None:
        """Queries to come: the statistics of the document's, turned by the average rotation of the next positions."""
        if not self._moments.count:
            return None
        line = torch.arange(self.n, self.n + FUTURE, device=self._moments.mean.device)
        cos, sin = (part.mean(0) for part in rotation(self.network, layer, line))
        moments = Moments()
        moments.count = self._moments.count
        moments.mean = rotate(self._moments.mean, cos, sin)
        once = rotate(self._moments.scatter, cos, sin)
        moments.scatter = rotate(once.transpose(1, 2), cos, sin).transpose(1, 2)
        return moments

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


def take(k: Tensor, v: Tensor, chosen: Kept, scores: Tensor) -> LayerEntries:
    """Copy the kept entries of k [kv_heads, n, d_k] and v [kv_heads, n, d_v] out in file order: head after head, ascending admit."""
    heads = torch.repeat_interleave(torch.arange(k.shape[0], device=k.device), chosen.counts)
    offsets = torch.zeros(k.shape[0] + 1, dtype=torch.int32, device=k.device)
    offsets[1:] = chosen.counts.cumsum(0)
    return LayerEntries(
        keys=k[heads, chosen.positions],
        values=v[heads, chosen.positions],
        offsets=offsets,
        positions=chosen.positions.int(),
        admit=chosen.admit.int(),
        scores=scores[heads, chosen.positions].float(),
    )


def trim(entries: LayerEntries, counts: Tensor) -> LayerEntries:
    """Only the first counts [kv_heads] entries of every head."""
    sizes = entries.offsets.diff()
    if bool((sizes == counts).all()):
        return entries
    offsets = torch.zeros_like(entries.offsets)
    offsets[1:] = counts.cumsum(0)
    heads = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    within = torch.arange(len(heads), device=counts.device) - offsets[heads]
    index = entries.offsets[heads] + within
    return LayerEntries(
        keys=entries.keys[index],
        values=entries.values[index],
        offsets=offsets,
        positions=entries.positions[index],
        admit=entries.admit[index],
        scores=entries.scores[index],
    )


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries [heads, s, d] as [kv_heads, G, s, d]."""
    return q.view(kv_heads, q.shape[0] // kv_heads, *q.shape[1:])


def _newest(k: Tensor, window: int | None) -> Kept:
    """A sliding layer's last window of entries, newest first."""
    heads, n, _ = k.shape
    count = n if window is None else min(n, window)
    line = torch.arange(n - 1, n - 1 - count, -1, device=k.device)
    counts = torch.full((heads,), count, device=k.device)
    return Kept(line.repeat(heads), torch.arange(1, count + 1, device=k.device).repeat(heads), counts)


def range_of(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """All positions of ascending (start, stop) ranges."""
    return [position for start, stop in ranges for position in range(start, stop)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
