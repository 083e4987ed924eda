"""The reader of a compression: copies out what one method keeps, in file order, while a prefill goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from dropkv.budgets import Kept
from dropkv.kernels.dispatch import gather_on_gpu
from dropkv.methods import MAX_MAX, Choice, LayerContext, LayerScores, Method, probability, told_probability
from dropkv.methods._base import Need
from dropkv.models import LayerGeometry
from dropkv.words import Words
from formats import LayerEntries


class Keeper:
    """Keeps entries by one method; rules that share entries among layers trim earlier layers as they go. words: of the document, for methods
    that pool by them. standing [n]: what a first reading (`Stands`) found, for methods that read twice."""

    def __init__(
        self,
        method: Method,
        kept: int,
        n: int,
        geometry: Sequence[LayerGeometry],
        words: Words | None = None,
        standing: Tensor | None = None,
    ) -> None:
        self.methods: Sequence[Method] = (method,)
        self.geometry = geometry
        self._full = [index for index, layer in enumerate(geometry) if layer.kind == "full"]
        self._choice = Choice(
            method,
            n if method.keeps_all else kept,
            [geometry[index].kv_heads for index in self._full],
            n,
            words,
            standing,
        )
        self._layers: list[LayerEntries] = []
        self._held: dict[int, list[int]] = {}  # by layer, entries of each head, for rules that share
        self._home: torch.device | None = None

    def full(self, layer: int, context: LayerContext, scores: Sequence[LayerScores]) -> None:
        chosen = self._choice.add(self._at_home(scores[0]))
        self._layers.append(take(context.k, context.v, _on(chosen, context.k.device), scores[0].raw))
        if self._choice.shares:
            for index, counts in zip(self._full, self._choice.held(), strict=False):
                held = self._held.get(index, counts)
                if counts != held:
                    self._layers[index] = shorten(self._layers[index], held, counts)
                self._held[index] = counts

    def sliding(self, layer: int, k: Tensor, v: Tensor) -> None:
        newest = _newest(k, self.geometry[layer].window)
        self._layers.append(take(k, v, newest, torch.zeros(k.shape[:2], device=k.device)))

    def finish(self) -> tuple[LayerEntries, ...]:
        """The kept entries of every layer."""
        for index, chosen in zip(self._full, self._choice.finish(), strict=True):
            entries = self._layers[index]
            entries = (
                trim(entries, chosen.counts) if chosen.order is None else pick(entries, chosen.order, chosen.counts)
            )
            self._layers[index] = replace(entries, admit=chosen.admit.int().to(entries.admit.device))
        return tuple(self._layers)

    def _at_home(self, scores: LayerScores) -> LayerScores:
        """Rules that share entries among layers compare them on the first one's device."""
        if not self._choice.shares:
            return scores
        self._home = self._home or scores.raw.device
        beside = scores.beside
        return LayerScores(scores.raw.to(self._home), None if beside is None else beside.to(self._home))


class Stands:
    """The reader of a first reading: what every token stands for in the whole model, and nothing else. told: as queries weigh."""

    def __init__(self, n: int, *, told: bool = False) -> None:
        look = told_probability if told else probability
        needs: frozenset[Need] = frozenset({"told"}) if told else frozenset()
        self.methods: Sequence[Method] = (Method("", "", look, reduction=MAX_MAX, needs=needs),)
        self._sum = torch.zeros(n)
        self._layers = 0

    def full(self, layer: int, context: LayerContext, scores: Sequence[LayerScores]) -> None:
        self._sum = self._sum.to(scores[0].raw.device) + scores[0].raw.mean(0)
        self._layers += 1

    def sliding(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Such layers keep their window whatever it stands for."""

    def standing(self) -> Tensor:
        """The mean over all heads of the largest attention paid to every token [n]."""
        return self._sum / max(1, self._layers)


def take(k: Tensor, v: Tensor, chosen: Kept, scores: Tensor) -> LayerEntries:
    """Copy the kept entries of k [kv_heads, n, d_k] and v [kv_heads, n, d_v] out in file order: head after head, ascending admit."""
    gathered = gather_on_gpu(k, v, chosen, scores)
    if gathered is not None:
        return gathered
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
    counts = counts.to(entries.offsets.device)
    sizes = entries.offsets.diff()
    if bool((sizes == counts).all()):
        return entries
    heads = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    begins = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    within = torch.arange(len(heads), device=counts.device) - begins
    return pick(entries, entries.offsets[heads] + within, counts)


def shorten(entries: LayerEntries, held: Sequence[int], counts: Sequence[int]) -> LayerEntries:
    """The same where both counts are known: held, what the heads have. The device is not waited for."""
    cuts = [part for old, new in zip(held, counts, strict=True) for part in (new, old - new)]

    def kept(x: Tensor) -> Tensor:
        return torch.cat(torch.split(x, cuts)[::2])

    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(entries.offsets.device, non_blocking=True)
    return LayerEntries(
        keys=kept(entries.keys),
        values=kept(entries.values),
        offsets=offsets,
        positions=kept(entries.positions),
        admit=kept(entries.admit),
        scores=kept(entries.scores),
    )


def pick(entries: LayerEntries, index: Tensor, counts: Tensor) -> LayerEntries:
    """The entries at `index` int64 [entries], head after head, of which each head has counts [kv_heads]."""
    index, counts = index.to(entries.offsets.device), counts.to(entries.offsets.device)
    offsets = torch.zeros_like(entries.offsets)
    offsets[1:] = counts.cumsum(0)
    return LayerEntries(
        keys=entries.keys[index],
        values=entries.values[index],
        offsets=offsets,
        positions=entries.positions[index],
        admit=entries.admit[index],
        scores=entries.scores[index],
    )


def _on(chosen: Kept, device: torch.device) -> Kept:
    return Kept(chosen.positions.to(device), chosen.admit.to(device), chosen.counts.to(device))


def _newest(k: Tensor, window: int | None) -> Kept:
    """A sliding layer's last window of entries, newest first."""
    heads, n, _ = k.shape
    count = n if window is None else min(n, window)
    line = torch.arange(n - 1, n - 1 - count, -1, device=k.device)
    counts = torch.full((heads,), count, device=k.device)
    return Kept(line.repeat(heads), torch.arange(1, count + 1, device=k.device).repeat(heads), counts)
