"""What replayed queries look at once some entries are gone, from one reading of the document: its queries are used as they were.

A replay's output a and its weights p over all that it sees are known. Without a set of keys E they are a' = (a - sum of p_j v_j) / (1 - sum of
p_j) and p' = p / (1 - sum of p_j), j in E. So nothing is read twice; what later layers would see of the smaller cache is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.question_free.documents import SLICE, Reading
from benchmarks.question_free.observe import Glance, Replay, Statistic, Turn, Watch
from benchmarks.question_free.observers import Observer
from dropkv.bench.survey import Collector
from dropkv.kernels.score import Attended, Observed
from dropkv.models import Model
from dropkv.prefill import read_together
from dropkv.prompts import Seam

STATISTICS = ("step/max", "step/sum", "p/max")  # those of the recipe
LEAST = 1e-6  # of a replay's attention to its own tokens


class Recorder(Watch):
    """A watch that holds on to the queries; of one document, on a CPU."""

    def __init__(self, replays: Sequence[Replay], kv_heads: int) -> None:
        turn = Turn("replay", tuple(Statistic.of(name) for name in STATISTICS), tuple(replays))
        super().__init__([turn], None, 1, kv_heads)
        self.queries: list[Attended] = []

    def __call__(self, queries: Observed) -> Tensor:
        if not isinstance(queries, Attended):
            raise ValueError("queries are recorded on a CPU alone, of models without a cap of logits or a window")
        self.queries.append(queries)
        return super().__call__(queries)


@dataclass(frozen=True)
class Seen:
    """A replay in one layer: its queries, the document positions of the keys that it sees (those it is not asked about first: `sinks` many), and
    its attention to its own tokens: the share [kv_heads, G, m] and what comes of it [kv_heads, G, m, d]."""

    queries: Attended
    places: Tensor
    sinks: int
    near: Tensor
    output: Tensor


class Replays:
    """All replays of a document, layer by layer. paid float32 [layers, kv_heads, G, n]: the attention to every key, summed over queries."""

    def __init__(self, reading: Reading, queries: Sequence[Attended], ranges: Sequence[tuple[int, int]]) -> None:
        self.reading = reading
        self.layers: list[list[Seen]] = []
        sinks, n = ranges[0][0], len(reading.ids)
        group = queries[0].shape[1]
        self.paid = torch.zeros((len(reading.keys), len(reading.keys[0]), group, n))
        for layer in range(len(reading.keys)):
            own = queries[layer * len(ranges) : (layer + 1) * len(ranges)]
            self.layers.append([])
            for (start, stop), one in zip(ranges, own, strict=True):
                places = torch.cat([torch.arange(sinks), torch.arange(start, stop)])
                near, output = torch.empty_like(one.log_sum_exp), torch.empty_like(one.outputs)
                for head in range(one.shape[0]):
                    p = self._weights(layer, head, one, places)
                    near[head] = (1 - p.sum(-1)).clamp_(min=LEAST)
                    output[head] = one.outputs[head] - p @ reading.values[layer][head, places]
                    self.paid[layer, head][:, places] += p.sum(1)
                self.layers[-1].append(Seen(one, places, sinks, near, output))

    def _weights(self, layer: int, head: int, queries: Attended, places: Tensor) -> Tensor:
        """p [G, m, places] of one KV head's queries."""
        keys = self.reading.keys[layer][head, places]
        logits = (queries.q[head] * queries.scale) @ keys.T
        return logits.sub_(queries.log_sum_exp[head].unsqueeze(-1)).exp_()

    def again(self, keep: Tensor) -> dict[str, Tensor]:
        """STATISTICS where softmax runs over kept entries alone [layers, kv_heads, G, n], 0 for the others; keep bool [layers, kv_heads, n]."""
        found = {name: torch.zeros_like(self.paid) for name in STATISTICS}
        for layer, replays in enumerate(self.layers):
            for seen in replays:
                for head in range(keep.shape[1]):
                    stays = keep[layer, head, seen.places]
                    places = seen.places[stays]
                    asked = places[int(stays[: seen.sinks].sum()) :]
                    if not len(asked):
                        continue
                    queries = self._without(layer, head, seen, places, asked)
                    largest = total = paid = torch.zeros(())
                    for _, _, block in queries.blocks(slice(0, 1)):
                        glance = Glance(block, queries.shape[1])
                        largest = torch.maximum(largest, glance.step.amax(2)[0])
                        total = total + glance.step.sum(2)[0]
                        paid = torch.maximum(paid, glance.p.amax(2)[0])
                    for name, value in zip(STATISTICS, (largest, total, paid), strict=True):
                        found[name][layer, head][:, asked] = value
        return found

    def _without(self, layer: int, head: int, seen: Seen, places: Tensor, asked: Tensor) -> Attended:
        """A head's queries as they look at the keys at `places` and their own tokens alone, asked about those at `asked`."""
        keys, values = (part[layer][head] for part in (self.reading.keys, self.reading.values))
        p = self._weights(layer, head, seen.queries, places)
        total = seen.near[head] + p.sum(-1)
        outputs = (seen.output[head] + p @ values[places]) / total.unsqueeze(-1)
        sums = seen.queries.log_sum_exp[head] + total.log()
        queries = seen.queries.q[head : head + 1]
        return Attended(queries, keys[asked][None], values[asked][None], seen.queries.scale, outputs[None], sums[None])


def read_replays(model: Model, seam: Seam, document: Sequence[int], observer: Observer) -> tuple[Reading, Replays]:
    """`read_documents` of one document and one observer with STATISTICS, and its replays."""
    observation, plan = observer.plan(seam, document, len(seam.head_ids))
    recorder = Recorder(plan, model.geometry[0].kv_heads)
    collector = Collector([recorder.method()], model.geometry)
    read_together(model, [document], [observation], collector, seeds=[0], slice_tokens=SLICE)
    parts = torch.stack([scores[0].beside for scores in collector.scores])
    layers, _, heads, n = parts.shape
    seen = parts.view(layers, len(STATISTICS), -1, heads, n).permute(1, 0, 3, 2, 4)
    reading = Reading(tuple(document), collector.keys, collector.values, torch.zeros(n))  # nobody asks for nats
    reading.seen["replay"] = dict(zip(STATISTICS, seen, strict=True))
    return reading, Replays(reading, recorder.queries, [probe.scored for probe in observation.probes])
