"""Documents read once, with the probes of every observer: keys and values, and every statistic of every key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.question_free.observe import Replay, Statistic, Turn, Watch, joined
from benchmarks.question_free.observers import Exchange, Observer
from dropkv.bench.survey import Collector
from dropkv.models import Model
from dropkv.observers import Observation
from dropkv.prefill import read_together
from dropkv.prompts import Seam
from dropkv.told import nats_of

SLICE = 8192  # document tokens a layer computes at once
ABOUT: dict[str, str | int] = {"name": "replay"}


@dataclass
class Reading:
    """One document: ids, keys and values [kv_heads, n, d] per layer, statistics of each observer by name, float32 [layers, kv_heads, G, n],
    and nats float32 [n] of its tokens."""

    ids: tuple[int, ...]
    keys: list[Tensor]
    values: list[Tensor]
    told: Tensor
    seen: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def read_documents(
    model: Model,
    seam: Seam,
    documents: Sequence[Sequence[int]],
    observers: Mapping[str, Observer],
    wanted: Mapping[str, Sequence[str]],
    *,
    notes: Sequence[Sequence[Sequence[Exchange]]] | None = None,
    nats: bool = True,
) -> list[Reading]:
    """Read documents of one length together, once, with the probes of every observer in `wanted`, which names the statistics to take from each.

    notes: of each document the exchanges about its chunks, for observers of the model's own texts. nats: whether any are needed; 0 otherwise.
    Documents whose probes differ in length are read one after another.
    """
    head, count = len(seam.head_ids), len(documents)
    own = notes or [()] * count
    plans = [
        {name: observers[name].plan(seam, document, head, exchanges) for name in wanted}
        for document, exchanges in zip(documents, own, strict=True)
    ]
    observations = [
        Observation(0, tuple(probe for observation, _ in plan.values() for probe in observation.probes), ABOUT)
        for plan in plans
    ]
    if len({tuple(len(probe.ids) for probe in observation.probes) for observation in observations}) > 1:
        return [
            read_documents(model, seam, [document], observers, wanted, notes=[exchanges], nats=nats)[0]
            for document, exchanges in zip(documents, own, strict=True)
        ]
    told = nats_of(model, documents, SLICE) if nats else torch.zeros((count, len(documents[0])), device=model.device)
    turns = [turn for name, names in wanted.items() for turn in _turns(name, names, plans[0][name][1])]
    watch = Watch(turns, told, count, model.geometry[0].kv_heads)
    collector = Collector([watch.method()], model.geometry)
    read_together(model, documents, observations, collector, seeds=[0] * count, slice_tokens=SLICE)
    parts = torch.stack([scores[0].beside for scores in collector.scores])  # [layers, statistics * G, heads, n]
    layers, _, heads, n = parts.shape
    shape = (layers, sum(len(turn.statistics) for turn in turns), -1, count, heads // count, n)
    parts = parts.view(shape).permute(3, 1, 0, 4, 2, 5)  # [documents, statistics, layers, kv_heads, G, n]
    readings = []
    for number, document in enumerate(documents):
        each = slice(number * (heads // count), (number + 1) * (heads // count))
        keys, values = ([x[each] for x in part] for part in (collector.keys, collector.values))
        readings.append(Reading(tuple(document), keys, values, told[number], _seen(turns, parts[number])))
    return readings


def _turns(name: str, statistics: Sequence[str], replays: Sequence[Replay]) -> list[Turn]:
    """An observer's probes, those of each turn together, in which order they come."""
    known = tuple(Statistic.of(one) for one in statistics)
    last = max(replay.turn for replay in replays)
    return [
        Turn(name, known, tuple(replay for replay in replays if replay.turn == number)) for number in range(last + 1)
    ]


def _seen(turns: Sequence[Turn], parts: Tensor) -> dict[str, dict[str, Tensor]]:
    """Statistics by observer and name, from those of all turns [statistics, ...]."""
    found: dict[str, dict[Statistic, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    rows = iter(parts)
    for turn in turns:
        for statistic in turn.statistics:
            found[turn.observer][statistic].append(next(rows))
    return {
        observer: {
            statistic.name: own[0] if len(own) == 1 else joined(statistic.reduction, own)
            for statistic, own in by_statistic.items()
        }
        for observer, by_statistic in found.items()
    }
