"""Compressing one document: template, observation, prefill, and the description that goes into the file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, overload

from dropkv import methods
from dropkv._version import __version__
from dropkv.budgets import check_forced, kept_count
from dropkv.cache import Prefix
from dropkv.documents import Document
from dropkv.errors import DocumentError, UsageError
from dropkv.fidelity import HeldOut, Predictions, compare, hold_out, predict, predict_alone
from dropkv.footprint import ENTRY_OVERHEAD, footprint, slice_for
from dropkv.generate import Answer, Session
from dropkv.identity import describe
from dropkv.memory import read_peak, start_peak
from dropkv.methods import Method, Pool
from dropkv.models import Model
from dropkv.observers import Observation, observe
from dropkv.prefill import Prefilled, prefill
from dropkv.prompts import Seam, question_list
from dropkv.settings import WITHOUT_REPLAYS, CompressSettings, Sampling
from dropkv.words import Words
from formats import BudgetInfo, DocumentInfo, LayerEntries, LayerInfo, Metadata, Quantization, write_file
from formats.errors import printable
from formats.quantized import describe as describe_codes
from formats.quantized import entry_bytes, quantize

QUESTION_ROOM = 320  # positions left free behind a document: a question and an answer of the default length (an eighth of short contexts)
ALPHA_RULES = ("head-adaptive", "model-wide", "two orders")  # those that give every head a part alike
NOT_WANTED = "not asked for"  # why a fidelity is missing
NO_PASSAGE = "the document is a single token, or leaves no room behind it for one of its passages"
NOT_FINITE = "the model's predictions are not finite"


@dataclass(frozen=True)
class Plan:
    """Everything decided about a document before the model reads it. ids: template head and document; kept: entries per KV head;
    whole_tokens: what ids would have been without --truncate; held: what fidelity is measured with, None when it is not.
    """

    seam: Seam
    ids: tuple[int, ...]
    head_tokens: int
    observation: Observation
    method: Method
    kept: int
    settings: CompressSettings
    whole_tokens: int
    held: HeldOut | None = None

    @property
    def tokens(self) -> int:
        """n, document tokens with the template head."""
        return len(self.ids)

    @property
    def truncated_from(self) -> int | None:
        """Tokens of the whole document where it was cut, else None."""
        return self.whole_tokens if self.whole_tokens > self.tokens else None


@dataclass(frozen=True)
class Estimate:
    """What a compression will take and give, before it is run.

    Bytes are exact but for the header and peak_bytes, for what zstd saves, and for the last grids of quantised heads.
    """

    document_tokens: int
    kept: int
    kept_entries: int
    full_entries: int
    file_bytes: int
    full_cache_bytes: int
    peak_bytes: int
    document_tokens_before_truncation: int | None = None


@dataclass(frozen=True)
class Report:
    """What a compression took and gave. Entries count every layer and KV head; peak_memory_bytes is measured and includes the weights,
    expected_memory_bytes is what was expected of it before.

    fidelity: as in the file, None when it was not measured; fidelity_missing says why. Its seconds are not part of the others.
    """

    document_tokens: int
    kept: int
    kept_entries: int
    full_entries: int
    full_cache_bytes: int
    prefill_seconds: float
    score_seconds: float
    peak_memory_bytes: int
    expected_memory_bytes: int = 0
    document_tokens_before_truncation: int | None = None
    fidelity: dict[str, Any] | None = None
    fidelity_seconds: float = 0.0
    fidelity_missing: str | None = None


class Compression:
    """A compressed document in memory: save it, or ask it at once.

    model: the one that read it. metadata: what the file will say of itself. report: what it took and gave, fidelity included.
    """

    def __init__(self, model: Model, plan: Plan, prefilled: Prefilled, metadata: Metadata, report: Report) -> None:
        self.model = model
        self.metadata = metadata
        self.report = report
        self._plan = plan
        self._prefilled = prefilled

    def __repr__(self) -> str:
        return f"<Compression of {summary(self.metadata)}>"

    @property
    def layers(self) -> tuple[LayerEntries, ...]:
        """The kept entries of every layer, as a file stores them: quantised ones are codes and grids."""
        return self._prefilled.layers

    def save(self, path: str | Path, *, overwrite: bool = False) -> int:
        """Write the .kv file; gives its size in bytes.

        overwrite: replace what is there. Raises FormatError when something is and it was not to be replaced, or when it cannot be written;
        no half-written file is ever left.
        """
        import torch

        settings = self._plan.settings
        tokens = torch.tensor(self._plan.ids, dtype=torch.int32) if settings.keep_tokens else None
        return write_file(path, self.metadata, self.layers, tokens, overwrite=overwrite, zstd=settings.zstd)

    @overload
    def ask(self, question: str, sampling: Sampling | None = None) -> Answer: ...
    @overload
    def ask(self, question: list[str] | tuple[str, ...], sampling: Sampling | None = None) -> list[Answer]: ...
    def ask(
        self, question: str | list[str] | tuple[str, ...], sampling: Sampling | None = None
    ) -> Answer | list[Answer]:
        """The answer to a question, or the answers to several, without saving: the same that a saved file gives. Raises QuestionError."""
        session = self.session()
        if isinstance(question, str):
            return session.ask(question, sampling)
        return [session.ask(one, sampling) for one in question_list(question)]

    def session(self) -> Session:
        """Ask without saving: the same entries, in the same order, as a saved file has; quantised ones restored as from the file."""
        stored = Prefix(self.layers, self.model.geometry, self._plan.tokens, self.metadata.quantization)
        return Session(self.model, self._plan.seam, stored.to(self.model.devices, self.model.dtype))


def summary(metadata: Metadata) -> str:
    """A compressed document in a few words."""
    document, model = printable(metadata.document.name, 80), printable(metadata.model.id, 80)
    return f"{document}: {metadata.document.tokens:,} tokens, {metadata.budget.kept:,} entries per KV head, {model}"


def plan(model: Model, document: Document, settings: CompressSettings) -> Plan:
    """Tokenise the document and decide what is observed and kept.

    Raises DocumentError when it does not fit (unless settings.truncate), BudgetError when the budget is below the entries always kept.
    """
    seam = Seam.of(model.tokenizer, system=settings.system, name=model.id)
    head = list(seam.head_ids)
    body = seam.document_ids(document.text)
    if not body:
        raise DocumentError(
            f"{document.name}: the tokenizer of {model.id} makes no tokens of it, give a document with text"
        )
    ids = head + body
    whole = len(ids)
    observation = observe(settings, seam, ids, len(head))
    while len(ids) > (limit := _room(model, len(ids), observation)):
        if not settings.truncate or limit <= len(head):
            raise DocumentError(_too_long(document, len(ids), limit, model, settings))
        ids = ids[:limit]
        observation = observe(settings, seam, ids, len(head))
    method = resolve_method(settings, len(head))
    forced = len(method.forced(len(ids)))
    if method.keeps_all:
        kept = len(ids)
    else:
        check_forced(settings.budget, len(ids), forced, document.name)
        kept = kept_count(settings.budget, len(ids), forced)
    held = None
    if settings.fidelity:
        held = hold_out(seam, ids, len(head), model.regime(len(ids)).up_to - len(ids) - len(head))
    return Plan(seam, tuple(ids), len(head), observation, method, kept, settings, whole, held)


def _room(model: Model, tokens: int, observation: Observation) -> int:
    """Tokens that a document of this length may have, so that replays or a question fit behind it into its RoPE regime."""
    up_to = model.regime(tokens).up_to
    return up_to - max(min(QUESTION_ROOM, up_to // 8), observation.longest_probe)


def _too_long(document: Document, tokens: int, limit: int, model: Model, settings: CompressSettings) -> str:
    up_to = model.regime(tokens).up_to
    place, longer = f"{document.name}: {tokens} tokens, {model.id} has {up_to} positions", ""
    if up_to < model.max_positions:
        place = f"{document.name}: {tokens} tokens, and the RoPE of {model.id} changes behind {up_to}"
        longer = f" (documents of more than {up_to} fit as well)"
    taken = up_to - limit
    if settings.observe == "replay" and limit < 1:
        return f"{place} and replay takes {taken} of them: no document fits{longer}, use a smaller --chunk"
    if settings.observe == "replay":
        return f"{place} and replay takes {taken} of them: at most {limit} fit{longer}, use --truncate, a smaller --chunk, or split it"
    if settings.observe != "tail":
        return f"{place} and the longest question takes {taken} of them: at most {limit} fit{longer}, use --truncate or split it"
    return f"{place}: at most {limit} fit with room for a question{longer}, use --truncate or split it"


def resolve_method(settings: CompressSettings, head_tokens: int) -> Method:
    """The method as observer and options leave it (METHODS, "What an observer changes"). Raises UsageError for an unknown one."""
    assert settings.method is not None  # since the settings were made
    method = methods.get(settings.method)
    kind = settings.observe.partition(":")[0]
    if "replay" in method.needs and kind != "replay":
        raise UsageError(
            f"method {method.name} observes with replays alone: use --observe replay, or --method {WITHOUT_REPLAYS}"
        )
    if kind in ("replay", "questions"):
        method = method.under_replay(head_tokens)
    if settings.pool is not None:
        method = replace(method, pool=Pool(method.pool.kind if method.pool else "max", settings.pool))
    if settings.alpha is not None:
        method = replace(method, alpha=settings.alpha)
    return method


def estimate(model: Model, document: Document, settings: CompressSettings) -> Estimate:
    """Sizes before the run. Raises what `plan` raises."""
    planned = plan(model, document, settings)
    n, size = planned.tokens, model.dtype.itemsize
    kept_entries, full_entries, stored_bytes, full_bytes = 0, 0, 0.0, 0
    for layer in model.geometry:
        own = min(n, layer.window or n) if layer.kind == "sliding" else planned.kept
        row = (layer.d_k + layer.d_v) * size
        kept_entries += own * layer.kv_heads
        full_entries += n * layer.kv_heads
        stored = row if settings.kv_dtype == "same" else entry_bytes(settings.kv_dtype, layer.d_k, layer.d_v)
        stored_bytes += own * layer.kv_heads * (stored + ENTRY_OVERHEAD)
        full_bytes += n * layer.kv_heads * row
    tokens = 4 * n if settings.keep_tokens else 0
    return Estimate(
        n,
        planned.kept,
        kept_entries,
        full_entries,
        round(stored_bytes) + tokens,
        full_bytes,
        _memory(model, planned)[1],
        planned.truncated_from,
    )


def _memory(model: Model, planned: Plan) -> tuple[int, int]:
    """Tokens of a slice, and the expected peak in bytes."""
    needed = footprint(
        model, planned.tokens, planned.observation, planned.held, methods=(planned.method,), kept=planned.kept
    )
    tokens = slice_for(model, needed)
    return tokens, needed.peak(tokens)


def compress_document(
    model: Model,
    document: Document,
    settings: CompressSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    expect: Callable[[int], None] | None = None,
) -> Compression:
    """Read the document, keep what matters, and measure what that changes. progress(done, total) is called after every layer; both count
    the document's tokens once for each layer of every reading. expect(bytes) is called before the model reads anything, with the memory it will
    take at most.

    Raises DocumentError, BudgetError, UsageError, ModelError.
    """
    planned = plan(model, document, settings)
    slice_tokens, expected = _memory(model, planned)
    if expect is not None:
        expect(expected)
    start_peak(model.device)

    def report_layers(done: int, total: int) -> None:
        if progress is not None:
            progress(done * planned.tokens, total * planned.tokens)

    prefilled = prefill(
        model,
        planned.ids,
        planned.observation,
        planned.method,
        planned.kept,
        seed=settings.seed,
        slice_tokens=slice_tokens,
        progress=report_layers,
        held=planned.held,
        words=Words.of(model.tokenizer, planned.ids, model.device) if "words" in planned.method.needs else None,
    )
    quantization = None
    if settings.kv_dtype != "same":
        quantization = describe_codes(settings.kv_dtype, [layer.offsets.tolist() for layer in prefilled.layers])
        prefilled = replace(prefilled, layers=tuple(quantize(layer, quantization) for layer in prefilled.layers))
    size = model.dtype.itemsize
    report = Report(
        document_tokens=planned.tokens,
        kept=planned.kept,
        kept_entries=sum(layer.positions.numel() for layer in prefilled.layers),
        full_entries=sum(planned.tokens * layer.kv_heads for layer in model.geometry),
        full_cache_bytes=sum(
            planned.tokens * layer.kv_heads * (layer.d_k + layer.d_v) * size for layer in model.geometry
        ),
        prefill_seconds=prefilled.prefill_seconds,
        score_seconds=prefilled.score_seconds,
        peak_memory_bytes=read_peak(model.device),
        expected_memory_bytes=expected,
        document_tokens_before_truncation=planned.truncated_from,
        fidelity_missing=NO_PASSAGE if settings.fidelity else NOT_WANTED,
    )
    made = Compression(model, planned, prefilled, _metadata(model, document, planned, prefilled, quantization), report)
    if planned.held is not None and prefilled.predictions is not None:
        started = time.perf_counter()
        fidelity = _fidelity(made, planned.held, prefilled.predictions)
        seconds = prefilled.held_seconds + time.perf_counter() - started
        made.metadata = replace(made.metadata, fidelity=fidelity)
        made.report = replace(
            report,
            fidelity=fidelity,
            fidelity_seconds=seconds,
            fidelity_missing=NOT_FINITE if fidelity is None else None,
            peak_memory_bytes=read_peak(model.device),
        )
    return made


def _fidelity(made: Compression, held: HeldOut, full: Predictions) -> dict[str, Any] | None:
    """Of the entries as questions meet them."""
    session = made.session()
    pruned = predict(made.model, session.prefix, held)
    alone = predict_alone(made.model, session.prefix, session.seam.head_ids, held)
    return compare(held, full, pruned, alone)


def _metadata(
    model: Model, document: Document, planned: Plan, prefilled: Prefilled, quantization: Quantization | None
) -> Metadata:
    method, settings = planned.method, planned.settings
    identity, tokenizer = describe(model, planned.seam)
    layers = tuple(
        LayerInfo(g.kind, g.query_heads, g.kv_heads, g.d_k, g.d_v, g.window, entries.positions.numel())
        for g, entries in zip(model.geometry, prefilled.layers, strict=True)
    )
    return Metadata(
        writer=f"dropkv {__version__}",
        model=identity,
        tokenizer=tokenizer,
        document=DocumentInfo(
            document.name, document.sha256, planned.tokens, planned.head_tokens, planned.whole_tokens
        ),
        method={
            "name": method.name,
            "power": method.power,
            "queries": method.reduction.queries,
            "group": method.reduction.group,
            "pool": {"kind": method.pool.kind, "size": method.pool.size} if method.pool else None,
            "seed": settings.seed,
            **({} if method.together is None else {"together": asdict(method.together)}),
        },
        observer=dict(planned.observation.description),
        budget=BudgetInfo(
            asked=settings.budget,
            kept=planned.kept,
            rule=method.rule + (", two stages" if method.two_stages else ", newest half" if method.recent_half else ""),
            alpha=method.alpha if method.rule in ALPHA_RULES else None,
            forced_first=method.forced_first,
            forced_last=method.forced_last,
            nested=method.nested,
        ),
        layers=layers,
        dtype=str(model.dtype).removeprefix("torch."),
        rope=model.regime(planned.tokens).described(model.rope),
        fidelity=None,
        quantization=quantization,
    )
