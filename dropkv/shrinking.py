"""Smaller budgets of a file that is there: without its model, without its document, and without reading it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dropkv._version import __version__
from dropkv.budgets import check_forced, forced_positions, kept_count
from dropkv.cache import Prefix
from dropkv.errors import BudgetError, DropkvError
from dropkv.hub.fetch import parts
from dropkv.settings import check_budget
from formats import BudgetInfo, LayerEntries, Metadata, Place, ShrinkReport, shrink_file
from formats.entries import INDEX_FIELDS, IndexPart
from formats.errors import printable, show_place
from formats.smaller import Rows, cut


def shrink(
    path: Place, budget: float | int, output: str | Path, *, overwrite: bool = False, threads: int | None = None
) -> ShrinkReport:
    """Write to `output` the file that `compress` would have made at a smaller budget (a float in (0, 1] or an int, as there).

    path: a file, or an address of the Hub (hf://...), of which only what is needed is fetched. The entries are the same ones in
    the same order, bit for bit; `fidelity`, which was measured with more of them, is left out. `output` may be `path` itself when
    `overwrite` is set. Raises BudgetError for a budget above the file's own or below the entries that are always kept, DropkvError for a
    method whose smaller budgets are no part of larger ones, FormatError for a file that is damaged and for one that exists or cannot be
    written, HubError.
    """
    return shrink_file(
        parts(path) if isinstance(path, str) else path,
        output,
        chooser(budget, show_place(path)),
        writer=f"dropkv {__version__}",
        overwrite=overwrite,
        threads=threads,
    )


def chooser(budget: float | int, shown: str) -> Callable[[Metadata], BudgetInfo]:
    """`smaller_budget` for a file whose metadata is still to be read. Raises BudgetError for what is no budget."""
    check_budget(budget)
    return lambda metadata: smaller_budget(metadata, budget, shown)


def smaller_budget(metadata: Metadata, budget: float | int, shown: str) -> BudgetInfo:
    """What the metadata of a file say of its budget once it is shrunk; `shown` is the file's name for messages.

    Raises BudgetError for a budget above the file's own or below the entries that are always kept, DropkvError when the
    kept sets of the file's rule are not nested: then the smaller ones are no part of it.
    """
    own, n = metadata.budget, metadata.document.tokens
    forced = len(forced_positions(n, own.forced_first, own.forced_last))
    try:
        check_forced(budget, n, forced)
    except BudgetError:
        least = min(forced, n)
        raise BudgetError(
            f"{shown}: budget {budget} of {n} tokens is fewer than the {least} entries per KV head that are always kept: "
            f"use --budget {least} or more"
        ) from None
    kept = kept_count(budget, n, forced)
    if kept > own.kept:
        raise BudgetError(
            f"{shown}: keeps {own.kept} entries per KV head, and budget {budget} of {n} tokens is {kept}: "
            f"use --budget {own.kept} or less, or compress the document again"
        )
    if kept < own.kept and not own.nested:
        name = printable(str(metadata.method.get("name", "")), 40)
        raise DropkvError(
            f"{shown}: what method {name} ({printable(own.rule, 60)}) keeps at budget {budget} is no smaller part of this file: "
            f"compress the document again with that budget, or with another --method"
        )
    return replace(own, asked=budget, kept=kept)


def shrink_prefix(prefix: Prefix, metadata: Metadata, budget: BudgetInfo) -> tuple[Prefix, Metadata]:
    """The prefix of a smaller budget, from `smaller_budget` of the file's metadata, and the metadata that goes with it."""
    index = tuple({field: getattr(layer, field).cpu() for field in INDEX_FIELDS} for layer in prefix.layers)
    smaller = cut(metadata, IndexPart(index, None), budget)
    layers = []
    for layer, rows, part in zip(prefix.layers, smaller.rows, smaller.index.layers, strict=True):
        on_device = {field: part[field].to(getattr(layer, field).device) for field in INDEX_FIELDS}
        layers.append(LayerEntries(_take(layer.keys, rows), _take(layer.values, rows), **on_device))
    return Prefix(layers, prefix.geometry, prefix.n), smaller.metadata


def _take(tensor: Tensor, rows: Rows) -> Tensor:
    return torch.cat([tensor[start:stop] for start, stop in rows])
