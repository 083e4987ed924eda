"""The theory bench: from a model and a document to result lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropkv import methods
from dropkv.bench.theory import tables
from dropkv.bench.theory.capture import LayerView, capture
from dropkv.bench.theory.study import GAP_TOKENS, Study, study
from dropkv.budgets import check_forced, forced_positions, kept, kept_count
from dropkv.documents import Document
from dropkv.errors import DocumentError, ModelError, UsageError
from dropkv.kernels.score import Window
from dropkv.models import Model
from dropkv.prompts import Seam
from dropkv.settings import check_budget

WINDOW = 8
METHOD = "dropkv"

Progress = Callable[[int, int], None]
Triple = tuple[int, int, int]


@dataclass
class Measured:
    """What one pass collects: eps of every triple, and the studies of the sampled ones."""

    eps: list[float]
    studies: list[Study]


def theory_report(
    model: Model,
    document: Document,
    *,
    budget: float | int = 0.05,
    samples: int = 128,
    seed: int = 0,
    question: str | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Result lines (JSON objects) of the paper's theory tables for one model and document.

    The last 8 tokens of document + question (of the document alone without one) are the queries. Candidates of a triple (layer, query head,
    query) are the keys that method `dropkv`, with these queries as its window, evicts from the head's KV head at `budget`; k is their number.
    eps is measured for every triple of the full-attention layers, all else for `samples` of them, drawn without replacement by `seed`.
    progress(done, total) is called after every layer. Raises UsageError, BudgetError, DocumentError, QuestionError, ModelError.
    """
    check_budget(budget)
    if samples < 1:
        raise UsageError(f"{samples} samples show nothing: use --samples 1 or more")
    ids = _ids(model, document, question)
    full = [layer for layer, geometry in enumerate(model.geometry) if geometry.kind == "full"]
    if not full:
        raise ModelError(f"{model.id} has no full-attention layers, so nothing is evicted: use another model")
    forced = len(forced_positions(len(ids), 0, WINDOW))
    check_forced(budget, len(ids), forced)
    count = kept_count(budget, len(ids), forced)
    if count >= len(ids):
        raise UsageError(f"budget {budget} keeps all {len(ids)} tokens, so nothing is evicted: use a smaller --budget")
    triples = [(layer, h, t) for layer in full for h in range(model.geometry[layer].query_heads) for t in range(WINDOW)]
    sampled = set(random.Random(seed).sample(triples, min(samples, len(triples))))
    measured = Measured([], [])

    def visit(view: LayerView) -> None:
        with one_thread():
            _visit(view, count, sampled, seed, measured)
        if progress is not None:
            progress(view.layer + 1, len(model.geometry))

    capture(model, ids, WINDOW, visit)
    common = {
        "version": 1,
        "kind": "theory",
        "model": model.id,
        "document": document.name,
        "document_tokens": len(ids),
        "question": question,
        "method": METHOD,
        "window": WINDOW,
        "budget": budget,
        "kept": count,
        "evicted": len(ids) - count,
        "seed": seed,
    }
    return [common | line for line in tables.lines(measured.eps, measured.studies)]


def _ids(model: Model, document: Document, question: str | None) -> list[int]:
    seam = Seam.of(model.tokenizer, name=model.id)
    ids = [
        *seam.head_ids,
        *seam.document_ids(document.text),
        *(() if question is None else seam.question_ids(question)),
    ]
    if len(ids) > model.max_positions:
        raise DocumentError(
            f"{document.name}: {len(ids)} tokens, {model.id} has {model.max_positions} positions: use a shorter document"
        )
    least = WINDOW + 2 * GAP_TOKENS
    if len(ids) < least:
        raise DocumentError(
            f"{document.name}: {len(ids)} tokens, the theory bench needs {least}: use a longer document"
        )
    return ids


@contextmanager
def one_thread() -> Iterator[None]:
    """For the length of the block torch computes in one thread: handing thousands of small products to several costs ten times their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _visit(view: LayerView, count: int, sampled: set[Triple], seed: int, measured: Measured) -> None:
    """Measure one layer."""
    evicted = evictions(view, count)
    n = view.k.shape[1]
    for head in range(view.q.shape[0]):
        gone = evicted[head // view.group]
        p = view.probabilities(head)
        measured.eps += p[:, gone].amax(1).tolist()
        for query in range(p.shape[0]):
            if (view.layer, head, query) in sampled:
                residuals = view.residuals(head, p[query])
                if not bool(torch.isfinite(residuals).all()):
                    raise ModelError(f"layer {view.layer} computed values that are not finite: use another --dtype")
                rng = random.Random(f"{seed} {view.layer} {head} {query}")
                measured.studies.append(study(view.layer, head, query, p[query], residuals, gone, n - p.shape[0], rng))


def evictions(view: LayerView, count: int) -> Tensor:
    """Which keys method `dropkv` evicts from each KV head when `count` are kept: bool [kv_heads, n]."""
    method = methods.get(METHOD)
    kv_heads, n, _ = view.k.shape
    queries = view.q.view(kv_heads, view.group, *view.q.shape[1:])
    raw = method.scores(Window(queries, view.k, view.v, view.scale, view.softcap))
    positions: Sequence[Tensor] = kept(method.pooled(raw), count, forced=method.forced_last, unpooled=raw)
    evicted = torch.ones(kv_heads, n, dtype=torch.bool, device=view.k.device)
    for head, rows in enumerate(positions):
        evicted[head, rows] = False
    return evicted
