"""dropkv's two sides: a document read and its entries kept; a file of them opened and asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dropkv._version import __version__
from dropkv.bench.speed.machine import Figures, refuse
from dropkv.bench.speed.material import Material, settings_of
from dropkv.bench.speed.plain import answer_figures
from dropkv.bench.speed.plan import SpeedPlan
from dropkv.budgets import kept_count
from dropkv.cache import Prefix
from dropkv.compression import resolve_method
from dropkv.decode.batch import ROUND, Asked, Row, make_batch
from dropkv.decode.tails import row_bytes
from dropkv.devices import wait_for
from dropkv.footprint import footprint, slice_for
from dropkv.methods import Method
from dropkv.models import Model
from dropkv.prefill import Prefilled, prefill
from dropkv.settings import Sampling
from formats import (
    BudgetInfo,
    DocumentInfo,
    Landing,
    LayerInfo,
    Metadata,
    ModelIdentity,
    TokenizerIdentity,
    read_file,
    write_file,
)


@dataclass(frozen=True)
class Cell:
    """A method at a budget with an observer ("none": it needs none), and a length."""

    method: str
    observer: str
    budget: float
    length: int


def compress(model: Model, plan: SpeedPlan, material: Material, cell: Cell) -> tuple[Method, Prefilled, Figures]:
    """Read a document as `compress` does, fidelity's passages included, whose seconds are apart.

    seconds: of prefill and score. expected_memory_bytes: what `compress` would have said before.
    """
    n, ids = cell.length, material.ids[: cell.length]
    settings = settings_of(plan, cell.method, cell.observer, cell.budget)
    method = resolve_method(settings, material.head_tokens)
    observation = material.observation(settings, n)
    held = material.held_out(n, model.regime(n).up_to - n)
    kept = n if method.keeps_all else kept_count(cell.budget, n, len(method.forced(n)))
    needed = footprint(model, n, observation, held, methods=(method,), kept=kept)
    size = slice_for(model, needed)
    refuse(model, needed.peak(size) - needed.weights)
    done = prefill(model, ids, observation, method, kept, slice_tokens=size, held=held)
    figures = {
        "seconds": done.prefill_seconds + done.score_seconds,
        "prefill_seconds": done.prefill_seconds,
        "score_seconds": done.score_seconds,
        "fidelity_seconds": done.held_seconds,
        "expected_memory_bytes": needed.peak(size),
        "slice_tokens": size,
        "kept_entries": sum(layer.positions.numel() for layer in done.layers),
    }
    return method, done, figures


def write(model: Model, cell: Cell, method: Method, done: Prefilled, path: Path) -> int:
    """Write the file of a document that was read; gives the size in bytes. The file names no model: it is only read here."""
    layers = tuple(
        LayerInfo(g.kind, g.query_heads, g.kv_heads, g.d_k, g.d_v, g.window, entries.positions.numel())
        for g, entries in zip(model.geometry, done.layers, strict=True)
    )
    metadata = Metadata(
        writer=f"dropkv {__version__}",
        model=ModelIdentity("none", "folder", None, "none", {}, "", {}),
        tokenizer=TokenizerIdentity("", "", {}, None),
        document=DocumentInfo("bench", "0" * 64, cell.length, 0, cell.length),
        method={"name": method.name},
        observer={"name": cell.observer},
        budget=BudgetInfo(cell.budget, max(1, int(cell.budget * cell.length)), method.rule, None, 0, 0, method.nested),
        layers=layers,
        dtype=str(model.dtype).removeprefix("torch."),
        rope={},
        fidelity=None,
    )
    return write_file(path, metadata, done.layers, None, overwrite=True)


def answer(model: Model, path: Path, questions: Sequence[Sequence[int]], answer_tokens: int) -> Figures:
    """Open a file, check every byte, and answer questions of one length in one batch; the model is loaded before."""
    model = replace(model, stop_ids=frozenset())  # every answer has all its tokens
    rows = len(questions)
    capacity = -(-(len(questions[0]) + answer_tokens) // ROUND) * ROUND
    refuse(model, 2 * path.stat().st_size + rows * row_bytes(model.geometry, model.dtype, capacity))
    wait_for(model.devices)
    started = time.perf_counter()
    contents = read_file(path, onto=lambda metadata: Landing(tuple(model.devices), model.dtype))
    prefix = Prefix(contents.layers, model.geometry, contents.header.metadata.document.tokens)
    wait_for(model.devices)
    opened = time.perf_counter() - started
    sampling = Sampling(max_new_tokens=answer_tokens)
    batch = make_batch(model, rows, capacity)
    batch.admit(
        [
            Row(number, Asked(prefix, tuple(question), sampling, answer_tokens))
            for number, question in enumerate(questions)
        ]
    )
    first = time.perf_counter() - started
    steps = []
    while batch.rows:
        began = time.perf_counter()
        batch.step()
        steps.append(time.perf_counter() - began)
    total = time.perf_counter() - started
    # Behind the last token a batch that works ahead has a step of little work: it is not counted.
    figures = answer_figures(rows, first, steps[: answer_tokens - 1], total)
    return figures | {"open_seconds": opened, "kept_entries": prefix.entries, "file_bytes": path.stat().st_size}
