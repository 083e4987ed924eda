"""Prefill, layer by layer and slice by slice: run, observe, score, keep, drop.

The sequence is [document; probes]. Inside one forward call of the decoder every layer first runs over the document's slices, filling one
buffer of keys and values, then over the probes; then the layer is scored and handed to a reader, which copies out what it keeps (in file
order), and the buffer is used again by the next layer. So at most one layer's full K and V lives beside the kept entries.

Behind the probes may come one held-out text, which observes nothing: its tokens see the whole document in every layer, so their logits are
those of the full cache, which is never there at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dropkv.attention import run_decoder, run_logits, sliced_layers
from dropkv.devices import wait_for
from dropkv.errors import DocumentError, ModelError
from dropkv.fidelity import HeldOut, Predictions
from dropkv.footprint import footprint, slice_for
from dropkv.keeper import Keeper, Stands
from dropkv.methods import Method
from dropkv.models import Model
from dropkv.observers import Observation, Probe
from dropkv.prefill_run import PrefillRun, Progress, Reader
from dropkv.spans import Cuts
from dropkv.told import nats_of, weighs
from dropkv.words import Words
from formats import LayerEntries


@dataclass(frozen=True)
class Reading:
    """Where the time of a prefill went (seconds), and what the full cache predicts of the held-out text, if there was one."""

    prefill: float
    score: float
    held: float = 0.0
    predictions: Predictions | None = None


@dataclass(frozen=True)
class Prefilled:
    """What a prefill leaves behind: the kept entries of every layer, where the time went (seconds), and the full cache's predictions of the
    held-out text."""

    layers: tuple[LayerEntries, ...]
    prefill_seconds: float
    score_seconds: float
    held_seconds: float = 0.0
    predictions: Predictions | None = None


def prefill(
    model: Model,
    document: Sequence[int],
    observation: Observation,
    method: Method,
    kept: int,
    *,
    seed: int = 0,
    slice_tokens: int | None = None,
    fused: bool | None = None,
    progress: Progress | None = None,
    held: HeldOut | None = None,
    words: Words | None = None,
) -> Prefilled:
    """Read `document` (ids, template head included), once or as often as the method says, and keep `kept` entries per KV head as it says.

    What is kept is the same, to the last bit, with and without `held`. words: the document's, for methods that need them; without, every token
    is one. Raises what `read` raises.
    """
    first: Reading | None = None
    standing: Tensor | None = None
    told: Tensor | None = None
    weighed, plain = "told" in method.needs and weighs(observation), 0.0
    readings = method.readings(weighed=weighed)
    if weighed:
        started = time.perf_counter()
        size = _slice(model, document, observation, [method]) if slice_tokens is None else slice_tokens
        told = nats_of(model, [document], size, _part(progress, 0, readings))
        plain = time.perf_counter() - started
    observed = partial(read, model, document, observation, seed=seed, slice_tokens=slice_tokens, fused=fused, told=told)
    if method.reads_twice:
        stands = Stands(len(document), told="told" in method.needs)
        first = observed(stands, progress=_part(progress, readings - 2, readings))
        standing = stands.standing()
    keeper = Keeper(method, kept, len(document), model.geometry, words, standing)
    reading = observed(keeper, progress=_part(progress, readings - 1, readings), held=held)
    seconds = (plain + reading.prefill, reading.score)
    if first is not None:
        seconds = (first.prefill + seconds[0], first.score + seconds[1])
    return Prefilled(keeper.finish(), *seconds, reading.held, reading.predictions)


def _part(progress: Progress | None, number: int, readings: int) -> Progress | None:
    """The progress of one of so many readings, numbered from 0."""
    if progress is None or readings == 1:
        return progress
    return lambda done, total: progress(number * total + done, readings * total)


def _slice(
    model: Model,
    document: Sequence[int],
    observation: Observation,
    methods: Sequence[Method],
    held: HeldOut | None = None,
    documents: int = 1,
) -> int:
    """Tokens that a layer computes at once where nobody says."""
    needed = footprint(model, len(document), observation, held, methods=methods, documents=documents)
    return slice_for(model, needed)


def read(
    model: Model,
    document: Sequence[int],
    observation: Observation,
    reader: Reader,
    *,
    seed: int = 0,
    slice_tokens: int | None = None,
    fused: bool | None = None,
    progress: Progress | None = None,
    held: HeldOut | None = None,
    told: Tensor | None = None,
) -> Reading:
    """Run the model over `document` (ids, template head included), its probes and the held-out text once; every layer goes to `reader` with
    its scores.

    slice_tokens: what a layer computes at once, None for as much as memory has room for. fused: whether probes go through the fused kernels in
    groups; None for where they can, on a GPU. told [1, n]: nats of the tokens, for methods whose queries weigh them; found first where not given.

    Probes and held-out text are placed at position n. Raises DocumentError when n + the longest of them leaves the document's RoPE regime,
    ModelError when a layer of the network bypasses the seam, or when keys, values or scores are not finite.
    """
    if held is not None:
        probe = Probe(held.ids, (0, len(document)), (), observing=0)
        observation = replace(observation, probes=(*observation.probes, probe))
    return read_together(
        model,
        [document],
        [observation],
        reader,
        seeds=[seed],
        slice_tokens=slice_tokens,
        fused=fused,
        progress=progress,
        held=held,
        told=told,
    )


def read_together(
    model: Model,
    documents: Sequence[Sequence[int]],
    observations: Sequence[Observation],
    reader: Reader,
    *,
    seeds: Sequence[int],
    slice_tokens: int | None = None,
    fused: bool | None = None,
    progress: Progress | None = None,
    held: HeldOut | None = None,
    told: Tensor | None = None,
) -> Reading:
    """`read` for several documents of one length, whose probes differ in nothing but their ids, in one forward pass.

    The reader sees the KV heads of all documents, one document after another, as if one layer had them all. held: the held-out text when it
    is the last probe of a single document. told [documents, n]: as in `read`. Raises what `read` raises, and ValueError for documents that do
    not fit together.
    """
    n = len(documents[0])
    observation = observations[0]
    if any(len(document) != n for document in documents) or any(_shape(o) != _shape(observation) for o in observations):
        raise ValueError("documents read together need the same length, window and places of their probes")
    regime = model.regime(n)
    if n + observation.longest_probe > regime.up_to:
        raise DocumentError(
            f"{n} tokens and {observation.longest_probe} of an observer do not fit into the {regime.up_to} positions that {model.id} has "
            f"for them: use a shorter document or a smaller --chunk"
        )
    on_gpu = model.device.type == "cuda" if fused is None else fused
    sequences = [
        [*document, *(token for probe in own.probes for token in probe.ids)]
        for document, own in zip(documents, observations, strict=True)
    ]
    places = list(range(n)) + [n + offset for probe in observation.probes for offset in range(len(probe.ids))]
    ids = torch.tensor(sequences, device=model.device)
    positions = torch.tensor([places], device=model.device).expand(len(documents), -1)
    if slice_tokens is None:
        slice_tokens = _slice(model, documents[0], observation, reader.methods, held, len(documents))
    if not weighs(observation) or not any("told" in method.needs for method in reader.methods):
        told = None
    elif told is None:
        told = nats_of(model, documents, slice_tokens)
    cuts = Cuts(n, observation.probes, slice_tokens, together=on_gpu)
    run = PrefillRun(
        model.network, model.geometry, n, observation, reader, seeds, progress, regime, fused=fused, told=told
    )
    rows = len(held.ids) if held is not None else 1  # hidden states that anything is made of
    predictions: Predictions | None = None
    started = time.perf_counter()
    with torch.inference_mode(), sliced_layers(model.network, cuts, run.enter, run.leave, rows):
        if held is None:
            run_decoder(model.network, ids, positions, run)
        else:
            predicted = torch.tensor(held.rows(0), device=model.device)
            logits = run_logits(model.network, ids, positions, run, keep=predicted)
            predictions = held.predictions(logits[0])
            run.holding.stop(model.devices[-1])
    wait_for(model.devices)
    seconds = time.perf_counter() - started
    if run.done != len(model.geometry):
        raise ModelError(
            f"only {run.done} of {len(model.geometry)} layers of {model.id} passed through dropkv: use another model"
        )
    score, holding = run.scoring.seconds(), run.holding.seconds()
    return Reading(seconds - score - holding, score, holding, predictions)


def _shape(observation: Observation) -> object:
    """All of an observation but the ids of its probes."""
    probes = [(len(probe.ids), probe.scored, probe.seen, probe.observing) for probe in observation.probes]
    return observation.window, probes
