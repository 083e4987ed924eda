"""What the cells of an accuracy run keep of its documents, and which of them keep the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropkv.bench.cells import Cell
from dropkv.bench.survey import Survey


def kept_sets(surveys: Sequence[Survey], cells: Sequence[Cell], head_tokens: int) -> list[Tensor]:
    """What every cell keeps of each document, bool [cells, layers, kv_heads, n]; documents that were read together are done together."""
    done: dict[int, Tensor] = {}
    for together in {id(one.together): one.together for one in surveys}.values():
        keep = torch.empty((together.documents, len(cells), *together.shape), dtype=torch.bool, device=together.device)
        places: dict[tuple[str, str], list[int]] = {}
        for place, cell in enumerate(cells):
            if cell.method == "full":
                keep[:, place] = True
            elif cell.method == "no-document":  # the template's head alone
                keep[:, place] = torch.arange(together.shape[-1], device=together.device) < max(1, head_tokens)
            else:
                places.setdefault((cell.observer, cell.method), []).append(place)
        for (observer, method), own in places.items():
            found = together.keep(observer, method, [cells[place].budget for place in own])
            for place, kept in zip(own, found, strict=True):
                keep[:, place] = kept
        done[id(together)] = keep
    return [done[id(one.together)][one.number] for one in surveys]


def same_sets(keep: Tensor) -> list[int]:
    """For every mask of keep [masks, ...] the first one that is equal to it."""
    return same_sets_of([keep])[0]


def same_sets_of(keeps: Sequence[Tensor]) -> list[list[int]]:
    """`same_sets` of several documents with as many masks each. Masks are known by two random sums that are exact in float64."""
    generator = torch.Generator().manual_seed(0)
    longest = max(keep[0].numel() for keep in keeps)
    weights = torch.randint(1 << 30, (longest, 2), generator=generator).to(keeps[0].device, torch.float64)
    sums = [keep.flatten(1).double() @ weights[: keep[0].numel()] for keep in keeps]
    alike = []
    for own in torch.stack(sums).tolist():
        firsts: dict[tuple[float, ...], int] = {}
        alike.append([firsts.setdefault(tuple(pair), number) for number, pair in enumerate(own)])
    return alike
