"""A document read once, with everything kept: its full cache, and every method's scores from which any budget is a selection.

Eviction never changes the prefill, so all methods and budgets of one observer share it. For measuring accuracy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv import methods
from dropkv.bench.masks import Masks
from dropkv.methods import Method
from dropkv.methods._layer import LayerContext, LayerScores
from dropkv.models import LayerGeometry, Model
from dropkv.observers.replay import plan_replays
from dropkv.observers.tail import plan_tail
from dropkv.prefill import read_together
from dropkv.prompts import Seam
from dropkv.words import Words

SLICE = 8192  # document tokens a layer computes at once; the models measured are small


class Collector:
    """A reader that keeps every layer's keys, values and scores; the KV heads are those of all documents that were read together."""

    def __init__(self, chosen: Sequence[Method], geometry: Sequence[LayerGeometry]) -> None:
        self.methods: Sequence[Method] = tuple(chosen)
        self.geometry = geometry
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.scores: list[Sequence[LayerScores]] = []

    def full(self, layer: int, context: LayerContext, scores: Sequence[LayerScores]) -> None:
        """Copy what the next layer overwrites."""
        self.keys.append(context.k.clone())
        self.values.append(context.v.clone())
        self.scores.append(tuple(scores))

    def sliding(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Sliding layers are kept as they are, whatever the method."""
        self.keys.append(k.clone())
        self.values.append(v.clone())


class Survey:
    """One document's full cache, keys and values [kv_heads, n, d] per layer, and the scores of (observer, method) pairs."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.n = n = len(ids)
        self.words: Words | None = None
        self._tokenizer, self._ids = model.tokenizer, tuple(ids)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._full = [index for index, layer in enumerate(model.geometry) if layer.kind == "full"]
        self._shape = (len(model.geometry), max(layer.kv_heads for layer in model.geometry), n)
        self._device = model.device
        self._methods: dict[tuple[str, str], Method] = {}
        self._layers: dict[tuple[str, str], list[LayerScores]] = {}
        self._masks: dict[tuple[str, str], Masks] = {}

    def take(self, observers: Sequence[str], collector: Collector, number: int, documents: int) -> None:
        """Add what one prefill collected of document `number` of `documents`, an observer for each method; keys and values are the same for
        all."""

        def own(x: Tensor, dim: int = 0) -> Tensor:
            heads = x.shape[dim] // documents
            return x.narrow(dim, number * heads, heads)

        if not self.keys:
            self.keys, self.values = [own(k) for k in collector.keys], [own(v) for v in collector.values]
        for index, (observer, method) in enumerate(zip(observers, collector.methods, strict=True)):
            self._methods[observer, method.name] = method
            self._layers[observer, method.name] = [
                LayerScores(own(part.raw), None if part.beside is None else own(part.beside, 1))
                for part in (scores[index] for scores in collector.scores)
            ]

    @property
    def everything(self) -> Tensor:
        """bool [layers, kv_heads, n], all true."""
        return torch.ones(self._shape, dtype=torch.bool, device=self._device)

    def keep(self, observer: str, method: str, budget: float) -> Tensor:
        """What a method keeps at a budget, bool [layers, kv_heads, n]; sliding layers keep everything."""
        name = (observer, method)
        if name not in self._masks:
            if self.words is None and "words" in self._methods[name].needs:
                self.words = Words.of(self._tokenizer, self._ids, self._device)
            self._masks[name] = Masks(self._methods[name], self._layers[name], self.words)
        kept = self._masks[name].keep(budget)
        if len(self._full) == self._shape[0]:
            return kept
        keep = self.everything
        keep[self._full] = kept
        return keep


def survey(
    model: Model,
    seam: Seam,
    documents: Sequence[Sequence[int]],
    wanted: Sequence[tuple[str, str]],
    *,
    head_tokens: int,
    chunk: int,
    window: int,
    seeds: Sequence[int],
) -> list[Survey]:
    """Prefill documents of one length (ids, template head included) together, once per observer among `wanted`, pairs of observer and method.

    Observers: "replay", "tail", "question" (the tail of a document that ends in the question) and "none" (scores that need no queries).
    Controls that are no methods are passed over. Raises what `read_together` raises.
    """
    known = set(methods.names())
    n = len(documents[0])
    results = [Survey(model, document) for document in documents]
    pairs_of: dict[str, set[tuple[str, str]]] = {"window": set(), "replay": set()}
    replayed = any(observer == "replay" for observer, _ in wanted)
    windowed = any(observer in ("tail", "question") for observer, _ in wanted)
    for observer, method in wanted:
        if method in known and method != "full":  # what needs no queries goes along with the others
            replays = observer == "replay" or (observer == "none" and replayed and not windowed)
            pairs_of["replay" if replays else "window"].add((observer, method))
    for observer, found in pairs_of.items():
        pairs = sorted(found)
        if not pairs and (observer == "replay" or pairs_of["replay"]):
            continue  # a document is read once even where no method wants scores
        chosen = [methods.get(name) for _, name in pairs]
        observations = [plan_tail(window, n) for _ in documents]
        if observer == "replay":
            observations = [plan_replays(seam, document, head_tokens, chunk) for document in documents]
            chosen = [method.under_replay(head_tokens) for method in chosen]
        collector = Collector(chosen, model.geometry)
        read_together(model, documents, observations, collector, seeds=seeds, slice_tokens=SLICE)
        for number, result in enumerate(results):
            result.take([own for own, _ in pairs], collector, number, len(documents))
    return results
