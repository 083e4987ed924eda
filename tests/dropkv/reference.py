"""A plain prefill that keeps everything: the whole sequence at once, every probability in memory, masks spelt out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dropkv.observers import Observation


@dataclass
class Recorder:
    """The attention of every layer as it happened: q, k, v, p and a, [heads or kv_heads, tokens, ...]. What slides, slides by position."""

    positions: Tensor  # int64 [1, tokens]
    layers: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        logits = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits + attention_mask
        if sliding_window is not None:
            back = self.positions[0].unsqueeze(1) - self.positions[0].unsqueeze(0)
            logits = logits.masked_fill(back >= sliding_window, -torch.inf)
        p = torch.softmax(logits, -1)
        a = p @ values
        self.layers.append({"q": query[0], "k": key[0], "v": value[0], "p": p[0], "a": a[0]})
        return a.transpose(1, 2).contiguous(), None


def sequence_of(document: list[int], observation: Observation) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions [1, T] and the additive mask [1, 1, T, T] of [document; probes]."""
    n = len(document)
    ids, positions = list(document), list(range(n))
    rows = [torch.arange(n)]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    for probe in observation.probes:
        m, old = len(probe.ids), seen.shape[0]
        grown = torch.zeros(old + m, old + m, dtype=torch.bool)
        grown[:old, :old] = seen
        for start, stop in (probe.scored, *probe.seen):
            grown[old:, start:stop] = True
        grown[old:, old:] = torch.ones(m, m, dtype=torch.bool).tril()
        seen = grown
        ids += probe.ids
        positions += range(n, n + m)
        rows.append(torch.arange(old, old + m))
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    return torch.tensor([ids]), torch.tensor([positions]), mask[None, None]


def record(network: Any, document: list[int], observation: Observation) -> list[dict[str, Tensor]]:
    """Run a float64 network over the whole sequence with recorded attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    ids, positions, mask = sequence_of(document, observation)
    recorder = Recorder(positions)
    AttentionInterface.register("recorded", recorder)
    AttentionMaskInterface.register("recorded", lambda *a, **k: None)
    network.set_attn_implementation("recorded")
    with torch.inference_mode():
        network(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    network.set_attn_implementation("dropkv")
    return recorder.layers


def odds_scores(layer: dict[str, Tensor], n: int, observation: Observation, kv_heads: int) -> Tensor:
    """Max over probes, queries and the group of p / (1 - p + eps) * ||a - v||, from the recorded probabilities: [kv_heads, n]."""
    scores = torch.zeros(kv_heads, n, dtype=torch.float64)
    heads = layer["q"].shape[0]
    group = heads // kv_heads
    row = n
    for probe in observation.probes:
        m = len(probe.ids)
        p = layer["p"][:, row : row + m]
        a = layer["a"][:, row : row + m]
        row += m
        for start, stop in (probe.scored,):
            v = layer["v"].repeat_interleave(group, 0)[:, start:stop]
            distance = (a.unsqueeze(2) - v.unsqueeze(1)).norm(dim=-1)
            rest = p.sum(-1, keepdim=True) - p[:, :, start:stop]
            part = (p[:, :, start:stop] / (rest + 1e-6) * distance).amax(1).view(kv_heads, group, -1).amax(1)
            scores[:, start:stop] = torch.maximum(scores[:, start:stop], part)
    return scores


def tail_scores(layer: dict[str, Tensor], n: int, window: int, kv_heads: int, power: int = 2) -> Tensor:
    """Sum over the last queries, mean over the group of (p / (1 - p + eps) * ||a - v||)^power: [kv_heads, n]."""
    group = layer["q"].shape[0] // kv_heads
    p, a = layer["p"][:, n - window : n, :n], layer["a"][:, n - window : n]
    v = layer["v"].repeat_interleave(group, 0)[:, :n]
    distance = (a.unsqueeze(2) - v.unsqueeze(1)).norm(dim=-1)
    rest = p.sum(-1, keepdim=True) - p
    return ((p / (rest + 1e-6) * distance) ** power).sum(1).view(kv_heads, group, -1).mean(1)
