"""A document read once, with everything kept: its full cache, and every method's scores from which any budget is a selection.

Eviction never changes the prefill, so all methods and budgets of one observer share it. For measuring accuracy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


class Together:
    """What the prefills of some documents of one length have left: the scores of (observer, method) pairs, of all documents at once."""

    def __init__(self, model: Model, documents: Sequence[Sequence[int]]) -> None:
        self.documents = len(documents)
        self.shape = (len(model.geometry), max(layer.kv_heads for layer in model.geometry), len(documents[0]))
        self.device = model.device
        self._tokenizer, self._ids = model.tokenizer, documents
        self._words: list[Words] = []
        self._full = [index for index, layer in enumerate(model.geometry) if layer.kind == "full"]
        self._methods: dict[tuple[str, str], Method] = {}
        self._layers: dict[tuple[str, str], list[LayerScores]] = {}

    def take(self, observers: Sequence[str], collector: Collector) -> None:
        """Add the scores of one prefill, an observer for each method."""
        for index, (observer, method) in enumerate(zip(observers, collector.methods, strict=True)):
            self._methods[observer, method.name] = method
            self._layers[observer, method.name] = [scores[index] for scores in collector.scores]

    def raw(self, observer: str, method: str) -> Tensor:
        """Scores of the layers that have a budget, float32 [documents, layers, kv_heads, n]."""
        layers = torch.stack([scores.raw for scores in self._layers[observer, method]])
        return layers.view(len(layers), self.documents, -1, layers.shape[-1]).transpose(0, 1)

    def keep(self, observer: str, method: str, budgets: Sequence[float]) -> Iterator[Tensor]:
        """For every budget what a method keeps of all documents, bool [documents, layers, kv_heads, n]; sliding layers keep everything."""
        if not self._words and "words" in self._methods[observer, method].needs:
            self._words = [Words.of(self._tokenizer, ids, self.device) for ids in self._ids]
        masks = Masks(self._methods[observer, method], self._layers[observer, method], self.documents, self._words)
        for budget in budgets:
            kept = masks.keep(budget)
            kept = kept.view(self.documents, -1, *kept.shape[1:])
            if len(self._full) < self.shape[0]:
                everything = torch.ones((self.documents, *self.shape), dtype=torch.bool, device=self.device)
                everything[:, self._full] = kept
                kept = everything
            yield kept


class Survey:
    """One document's full cache, keys and values [kv_heads, n, d] per layer, and its place among those that were read together."""

    def __init__(self, together: Together, number: int) -> None:
        self.together = together
        self.number = number
        self.n = together.shape[-1]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def take(self, collector: Collector) -> None:
        """Add the keys and values that one prefill collected; they are the same for all observers."""
        if not self.keys:
            documents = self.together.documents
            self.keys, self.values = (
                [x.view(documents, -1, *x.shape[1:])[self.number] for x in part]
                for part in (collector.keys, collector.values)
            )

    @property
    def everything(self) -> Tensor:
        """bool [layers, kv_heads, n], all true."""
        return torch.ones(self.together.shape, dtype=torch.bool, device=self.together.device)

    def keep(self, observer: str, method: str, budget: float) -> Tensor:
        """What a method keeps at a budget, bool [layers, kv_heads, n]; sliding layers keep everything."""
        (kept,) = self.together.keep(observer, method, [budget])
        return kept[self.number]


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
    together = Together(model, documents)
    results = [Survey(together, number) for number in range(len(documents))]
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
        together.take([own for own, _ in pairs], collector)
        for result in results:
            result.take(collector)
    return results
