"""Documents read once for each observer: keys and values, and every statistic of every key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.question_free.observe import Statistic, Watch
from benchmarks.question_free.observers import Observer
from dropkv.bench.survey import Collector
from dropkv.models import Model
from dropkv.prefill import read_together
from dropkv.prompts import Seam
from dropkv.told import nats_of

SLICE = 8192  # document tokens a layer computes at once


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
    observers: dict[str, Observer],
    wanted: dict[str, Sequence[str]],
) -> list[Reading]:
    """Read documents of one length together, once for each observer in `wanted`, which names the statistics to take from each."""
    told = nats_of(model, documents, SLICE)
    readings: list[Reading] = []
    head = len(seam.head_ids)
    count = len(documents)
    for name, names in wanted.items():
        statistics = [Statistic.of(one) for one in names]
        plans = [observers[name].plan(seam, document, head) for document in documents]
        observations = [observation for observation, _ in plans]
        watch = Watch(statistics, plans[0][1], told, count, model.geometry[0].kv_heads)
        collector = Collector([watch.method()], model.geometry)
        read_together(model, documents, observations, collector, seeds=[0] * count, slice_tokens=SLICE)
        parts = torch.stack([scores[0].beside for scores in collector.scores])  # [layers, statistics * G, heads, n]
        layers, _, heads, n = parts.shape
        shape = (layers, len(statistics), -1, count, heads // count, n)
        parts = parts.view(shape).permute(3, 1, 0, 4, 2, 5)  # [documents, statistics, layers, kv_heads, G, n]
        if not readings:
            each = heads // count
            for number, document in enumerate(documents):
                own = slice(number * each, (number + 1) * each)
                keys, values = ([x[own] for x in part] for part in (collector.keys, collector.values))
                readings.append(Reading(tuple(document), keys, values, told[number]))
        for reading, own_parts in zip(readings, parts, strict=True):
            reading.seen[name] = dict(zip(names, own_parts, strict=True))
    return readings
