"""What can be done to entries after they were selected: evicted ones merged into kept ones, lost attention made up for, a second selection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.question_free.again import Replays
from benchmarks.question_free.documents import Reading
from benchmarks.question_free.entries import Entries
from benchmarks.question_free.keep import Ranking, Rule
from benchmarks.question_free.recipe import TINY, Recipe
from benchmarks.question_free.text import Text
from dropkv.attention import rotation
from dropkv.budgets import kept_count
from dropkv.kernels.moments import rotate, unrotate
from dropkv.models import Model

SINKS = 4  # first entries that nothing is merged into: their values are small, and attention to them means nothing
ENDS = 4  # entries at both ends of a document that every head keeps


def nearest(keep: Tensor) -> Tensor:
    """For every position of a head the nearest kept one behind the sinks, the earlier of two; keep bool [n] -> int64 [n]."""
    places = torch.nonzero(keep).squeeze(-1)
    places = places[places >= SINKS]
    own = torch.arange(len(keep))
    after = torch.searchsorted(places, own).clamp(max=len(places) - 1)
    before = (after - 1).clamp(min=0)
    return torch.where(own - places[before] <= places[after] - own, places[before], places[after])


def merged(reading: Reading, keep: Tensor, weights: Tensor, model: Model | None = None) -> Entries:
    """Evicted values averaged into the nearest kept one of their head, with weights [layers, kv_heads, n] where that counts as 1; with a model keys
    as well, turned to the position of the kept one first."""
    keys, values = [], []
    n = len(reading.ids)
    for layer, (old_keys, old_values) in enumerate(zip(reading.keys, reading.values, strict=True)):
        own = torch.where(keep[layer], 1.0, weights[layer])
        to = torch.stack([nearest(mask) for mask in keep[layer]])
        to = torch.where(keep[layer], torch.arange(n), to)
        values.append(_averaged(old_values, own, to))
        if model is None:
            keys.append(old_keys)
            continue
        cos, sin = rotation(model.network, layer, torch.arange(n), n)
        keys.append(rotate(_averaged(unrotate(old_keys, cos, sin), own, to), cos, sin))
    return Entries.of(keys, values, keep)


def _averaged(x: Tensor, weights: Tensor, to: Tensor) -> Tensor:
    """Means of x [kv_heads, n, d] by the place they go to."""
    total = torch.zeros_like(weights).scatter_add_(1, to, weights)
    at = to.unsqueeze(-1).expand_as(x)
    return torch.zeros_like(x).scatter_add_(1, at, x * weights.unsqueeze(-1)) / total.clamp(min=TINY).unsqueeze(-1)


def by_score(scores: Tensor, keep: Tensor) -> Tensor:
    """Weights for `merged`: an evicted entry's score over that of the kept one it goes to, at most 1; scores [layers, kv_heads, n]."""
    to = torch.stack([torch.stack([nearest(mask) for mask in layer]) for layer in keep])
    return (scores / scores.gather(-1, to).clamp(min=TINY)).clamp(max=1)


def with_rest(reading: Reading, keep: Tensor) -> Entries:
    """One entry more for every head, in place of all that went: their mean key, as keys are rotated, their mean value, the log of their count."""
    gone = ~keep
    counts = gone.sum(-1)
    means = [
        [
            (gone[layer].unsqueeze(-1) * x).sum(1) / counts[layer].clamp(min=1).unsqueeze(-1)
            for layer, x in enumerate(part)
        ]
        for part in (reading.keys, reading.values)
    ]
    return Entries.of(reading.keys, reading.values, keep).with_one_more(*means, list(counts.float().log()))


def with_bias(reading: Reading, keep: Tensor, paid: Tensor) -> Entries:
    """Kept entries heavier for every query head, so that they get what the whole document would, were a question to look as the replays did:
    -log of the share that they have of `paid` [layers, kv_heads, G, n]."""
    share = (paid * keep.unsqueeze(2)).sum(-1) / paid.sum(-1)
    return Entries.of(reading.keys, reading.values, keep).weighed(list(-share.clamp(min=TINY).log()))


def selected_again(
    recipe: Recipe, reading: Reading, replays: Replays, text: Text, first: Tensor, budget: float
) -> Tensor:
    """What a recipe keeps of `first`, bool [layers, kv_heads, n], by what replays look at there. Where a head's mean counts, evicted entries have
    their first scores; none comes back."""
    again = replays.again(first)
    seen = {name: torch.where(first.unsqueeze(2), again[name], old) for name, old in reading.seen["replay"].items()}
    pooled, raw, own = recipe.scores({"replay": seen}, reading.told, text, budget)
    return _within(recipe, first, pooled, raw, own, budget)


def looked_at(
    recipe: Recipe, reading: Reading, text: Text, keep: Tensor, paid: Mapping[int, tuple[Tensor, Tensor]], budget: float
) -> dict[str, Tensor]:
    """A second look: of entries kept, bool [layers, kv_heads, n], those of a smaller budget that a question's tokens look at, masks of that shape.

    paid: what `EntriesRun` has collected. heads: the same part of every head's, those most paid to. model-wide: the most paid to of all heads.
    recipe: what `recipe` makes of the question as if it were a replay. The ends stay.
    """
    layers, heads, n = keep.shape
    group = paid[0][0].shape[1]
    spread = torch.zeros((2, layers, heads, group, n))
    for layer, parts in paid.items():
        for head in range(heads):
            places = torch.nonzero(keep[layer, head]).squeeze(-1)
            for number, part in enumerate(parts):
                spread[number, layer, head][:, places] = part[head, :, : len(places)]
    most = spread[0].amax(2).masked_fill(~keep, -1.0)
    count = kept_count(budget, n, 2 * ENDS)
    wide = Ranking(Rule(first=ENDS, last=ENDS), most, most).keep(budget)
    most[..., :ENDS], most[..., -ENDS:] = torch.inf, torch.inf
    counts = keep.sum(-1, keepdim=True)
    shares = (counts * (layers * heads * count / int(keep.sum()))).long().clamp(min=2 * ENDS)
    by_head = most.argsort(dim=-1, descending=True, stable=True).argsort(-1) < shares
    seen = {"replay": {"p/max": spread[0], "p/sum": spread[1]}}
    pooled, raw, own = recipe.scores(seen, reading.told, text, budget)
    return {"heads": by_head, "model-wide": wide, "recipe": _within(recipe, keep, pooled, raw, own, budget)}


def _within(recipe: Recipe, keep: Tensor, pooled: Tensor, raw: Tensor, own: Tensor | None, budget: float) -> Tensor:
    """A recipe's choice of entries that are kept already."""
    masked = [x.masked_fill(~keep, -1.0) for x in (pooled, raw, pooled if own is None else own)]
    return Ranking(recipe.rule, *masked).keep(budget)
