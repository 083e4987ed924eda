"""Prefill, layer by layer and slice by slice: run, observe, score, keep, drop.

The sequence is [document; probes]. Inside one forward call of the decoder every layer first runs over the document's slices, filling one
buffer of keys and values, then over the probes; then the layer is scored, its kept entries are copied out in file order, and the buffer
is used again by the next layer. So at most one layer's full K and V lives beside the kept entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropkv.attention import LayerDone, run_decoder, sliced_layers
from dropkv.budgets import Kept, forced_positions, select
from dropkv.errors import ModelError
from dropkv.kernels.causal import causal_attention
from dropkv.kernels.probe import probe_attention
from dropkv.kernels.score import Window
from dropkv.methods import Method
from dropkv.models import LayerGeometry, Model
from dropkv.observers import Observation, Probe
from formats import LayerEntries

SLICE = 2048  # document tokens a layer computes at once

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Span:
    """One slice of the sequence: document tokens, or exactly one probe."""

    start: int
    stop: int
    probe: Probe | None


@dataclass(frozen=True)
class Prefilled:
    """What a prefill leaves behind: the kept entries of every layer, and where the time went (seconds)."""

    layers: tuple[LayerEntries, ...]
    prefill_seconds: float
    score_seconds: float


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

    Probes are placed at position n, so n + observation.longest_probe must not exceed the model's positions (the caller checks).
    Raises ModelError when a layer of the network bypasses the seam, or when keys, values or scores are not finite.
    """
    n = len(document)
    spans = plan_spans(n, observation.probes, slice_tokens)
    sequence = list(document) + [token for probe in observation.probes for token in probe.ids]
    places = list(range(n)) + [n + offset for probe in observation.probes for offset in range(len(probe.ids))]
    ids = torch.tensor([sequence], device=model.device)
    positions = torch.tensor([places], device=model.device)
    run = PrefillRun(model.geometry, n, spans, observation, method, kept, seed, progress)
    started = time.perf_counter()
    with (
        torch.inference_mode(),
        sliced_layers(model.network, [(span.start, span.stop) for span in spans], run.enter, run.leave),
    ):
        run_decoder(model.network, ids, positions, run)
    _wait(model.device)
    if len(run.layers) != len(model.geometry):
        raise ModelError(
            f"only {len(run.layers)} of {len(model.geometry)} layers of {model.id} passed through dropkv: use another model"
        )
    total = time.perf_counter() - started
    return Prefilled(tuple(run.layers), total - run.score_seconds, run.score_seconds)


class PrefillRun:
    """The run that travels with the forward call: holds the current layer's buffers and collects the kept entries."""

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        n: int,
        spans: Sequence[Span],
        observation: Observation,
        method: Method,
        kept: int,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.geometry = geometry
        self.n = n
        self.spans = spans
        self.observation = observation
        self.method = method
        self.kept = kept
        self.seed = seed
        self.progress = progress
        self.layers: list[LayerEntries] = []
        self.score_seconds = 0.0
        self._span = spans[0]
        self._seen: set[int] = set()
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._tail: list[Tensor] = []
        self._scores: Tensor | None = None
        self._constants: tuple[float, float | None] = (1.0, None)

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
            return self._probe(layer, self._span.probe, queries, keys, values, scale, softcap, reach)[None]
        start, stop = self._span.start, self._span.stop
        buffer_k, buffer_v = self._buffers(keys, values)
        buffer_k[:, start:stop] = keys
        buffer_v[:, start:stop] = values
        first = self.n - self.observation.window  # the tail's queries may lie in two slices
        if stop > first:
            self._tail.append(queries[:, max(0, first - start) :].clone())
        if layer == len(self.geometry) - 1:
            raise LayerDone  # nothing follows: keys, values and queries are all that is needed
        return causal_attention(
            queries, buffer_k[:, :stop], buffer_v[:, :stop], scale=scale, reach=reach, softcap=softcap
        )[None]

    def leave(self, layer: int) -> None:
        """All slices of a layer have run: score, keep, and free the buffers for the next layer."""
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
            entries = take(k, v, _newest(k, geometry.window), torch.zeros(k.shape[:2], device=k.device))
        else:
            raw = self._raw_scores(layer, k, v)
            if not bool(torch.isfinite(raw).all()):
                raise ModelError(
                    f"layer {layer} has scores that are not finite: nothing was written, use another --dtype"
                )
            forced = forced_positions(self.n, self.method.forced_first, self.method.forced_last)
            count = self.n if self.method.keeps_all else self.kept
            chosen = select(
                self.method.pooled(raw),
                count,
                forced=forced,
                rule=self.method.rule,
                alpha=self.method.alpha,
                unpooled=raw,
            )
            entries = take(k, v, chosen, raw)
        self.layers.append(entries)
        self._tail, self._scores = [], None
        if layer + 1 < len(self.geometry) and self.geometry[layer + 1] != geometry:
            self._k = self._v = None
        self.score_seconds += time.perf_counter() - started
        if self.progress is not None:
            self.progress(layer + 1, len(self.geometry))

    def _probe(
        self,
        layer: int,
        probe: Probe,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        reach: int | None,
    ) -> Tensor:
        """Attention of a probe's tokens over the document keys it sees and itself; their contributions go into the layer's scores."""
        buffer_k, buffer_v = self._buffers(k, v)
        started = time.perf_counter()
        first, last = probe.scored
        keys = torch.cat([*(buffer_k[:, start:stop] for start, stop in (probe.scored, *probe.seen)), k], dim=1)
        values = torch.cat([*(buffer_v[:, start:stop] for start, stop in (probe.scored, *probe.seen)), v], dim=1)
        positions = None
        if reach is not None:
            places = [*range_of((probe.scored, *probe.seen)), *range(self.n, self.n + q.shape[1])]
            positions = torch.tensor(places, device=q.device)
        wanted = self.method.observed is not None and self.geometry[layer].kind == "full"
        outputs, scores = probe_attention(
            q,
            keys,
            values,
            scale=scale,
            columns=last - first,
            score=self.method.scores if wanted else None,
            softcap=softcap,
            positions=positions,
            reach=reach,
        )
        if scores is not None:
            if self._scores is None:
                self._scores = scores.new_zeros((scores.shape[0], self.n))
            part = self._scores[:, first:last]
            torch.maximum(part, scores, out=part)  # the largest score of any probe that observes a key counts
        self.score_seconds += time.perf_counter() - started
        if layer == len(self.geometry) - 1:
            raise LayerDone
        return outputs

    def _raw_scores(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Scores float32 [kv_heads, n] before pooling."""
        if self.method.unobserved is not None:
            return self.method.unobserved(k, v, self.seed + layer).float()
        if self._scores is not None:
            return self._scores
        if not self._tail:  # a document of nothing but sinks has no replay: every entry is kept anyway
            return k.new_zeros(k.shape[:2], dtype=torch.float32)
        scale, softcap = self._constants
        q = torch.cat(self._tail, dim=1)
        return self.method.scores(Window(q.view(k.shape[0], -1, *q.shape[1:]), k, v, scale, softcap))

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
