"""What `compress` says: of each document, written, estimated or failed, and of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropkv.settings import CompressSettings
from dropkv_cli.endings import failure
from dropkv_cli.fidelity import fidelity_lines
from dropkv_cli.options import note_budget
from dropkv_cli.output import compared, complain, failure_keys, json_line, say, size
from dropkv_cli.progress import waiting
from dropkv_cli.targets import Target
from formats.errors import show_path

if TYPE_CHECKING:
    from dropkv.compression import Compression, Estimate, Report
    from dropkv.documents import Document
    from dropkv.models import Model


@dataclass(frozen=True)
class Job:
    """What is asked of every document."""

    settings: CompressSettings
    force: bool
    dry_run: bool
    as_json: bool
    output: str


def report_failure(error: Exception, target: Target, job: Job, *, alone: bool) -> None:
    """The failure of one document: the end of the command when it is the only one or standard output fails, else a line."""
    text = "" if alone else failure(error)
    if not text:
        raise error
    text = text.removeprefix(f"{target.shown}: ").removeprefix(f"{Path(target.document).name}: ")
    text = f"{target.shown}: {text}"
    complain(text)
    if job.as_json:
        json_line(_names(target) | failure_keys(text))


def sum_up(sizes: list[int], failures: int, job: Job) -> None:
    """One line about all documents, the good and the bad."""
    done = "would be written" if job.dry_run else "written"
    failed = f", {failures:,} failed" if failures else ""
    files = "1 file" if len(sizes) == 1 else f"{len(sizes):,} files"
    say(f"{files} {done}, {'about ' if job.dry_run else ''}{size(sum(sizes))} in all{failed}")


def report_result(
    compression: Compression,
    model: Model,
    target: Target,
    job: Job,
    file_bytes: int,
    load: float,
    write: float,
    total: float,
) -> None:
    """A document that was written: on a line of JSON, or for people. load, write, total: seconds."""
    report = compression.report
    _note_budget(report, model, target, job)
    if job.as_json:
        json_line(
            _about(model, target, job, report, file_bytes)
            | {
                "fidelity": report.fidelity,
                "fidelity_missing": report.fidelity_missing,
                "seconds": {
                    "load": load,
                    "prefill": report.prefill_seconds,
                    "score": report.score_seconds,
                    "fidelity": report.fidelity_seconds,
                    "write": write,
                    "total": total,
                },
                "peak_memory_bytes": report.peak_memory_bytes,
                "expected_memory_bytes": report.expected_memory_bytes,
            }
        )
        return
    say(f"{target.shown} -> {show_path(target.path or '')}")
    _say_counts(report, model)
    say(
        f"  {size(file_bytes)} on disk, the full cache is {size(report.full_cache_bytes)}: "
        f"{compared(file_bytes, report.full_cache_bytes)}"
    )
    if job.settings.fidelity:
        lines = fidelity_lines(report.fidelity, compression.metadata.observer)
        say("  fidelity: " + "\n    ".join(lines) + (f": {report.fidelity_missing}" if report.fidelity_missing else ""))
    say(
        f"  {total:.1f} s (model {load:.1f}, prefill {report.prefill_seconds:.1f}, score {report.score_seconds:.1f}, "
        f"fidelity {report.fidelity_seconds:.1f}, write {write:.1f}), peak memory {size(report.peak_memory_bytes)} "
        f"({size(report.expected_memory_bytes)} expected)"
    )


def foretell(model: Model, document: Document, needed: int) -> None:
    """The memory that a document will take, before the model reads it: on a terminal, or where there is too little."""
    from dropkv.memory import available_memory

    available = available_memory(model.device)
    tell = waiting if available is None or needed <= available else say
    tell(f"{document.name}: about {size(needed)} of memory needed{_there_is(available, needed)}")


def report_estimate(sizes: Estimate, model: Model, target: Target, job: Job) -> None:
    """What a document would take and give."""
    from dropkv.memory import available_memory

    _note_budget(sizes, model, target, job)
    if job.as_json:
        json_line(
            _about(model, target, job, sizes, sizes.file_bytes)
            | {
                "peak_memory_bytes": sizes.peak_bytes,
                "available_memory_bytes": available_memory(model.device),
                "dry_run": True,
            }
        )
        return
    before = "" if job.settings.zstd is None else " before --zstd"
    say(f"{target.shown}: nothing written (--dry-run)")
    _say_counts(sizes, model)
    say(
        f"  about {size(sizes.file_bytes)} on disk{before}, the full cache is {size(sizes.full_cache_bytes)}; "
        f"about {size(sizes.peak_bytes)} of memory needed{_there_is(available_memory(model.device), sizes.peak_bytes)}"
    )


def _there_is(available: int | None, needed: int) -> str:
    if available is None:
        return ""
    return f", {'ONLY ' if available < needed else ''}{size(available)} available"


def _note_budget(sizes: Report | Estimate, model: Model, target: Target, job: Job) -> None:
    if job.settings.method != "full" and any(layer.kind == "full" for layer in model.geometry):
        note_budget(job.settings.budget, sizes.document_tokens, target.shown)


def _say_counts(sizes: Report | Estimate, model: Model) -> None:
    """Tokens and entries. Sliding layers keep what they keep: the number for each head is that of the others."""
    before = sizes.document_tokens_before_truncation
    if before is not None:
        say(f"  cut: the first {sizes.document_tokens:,} of {before:,} tokens were read (--truncate)")
    share = f"{sizes.kept_entries:,} of {sizes.full_entries:,}, {100 * sizes.kept_entries / sizes.full_entries:.1f} %"
    if all(layer.kind == "sliding" for layer in model.geometry):
        say(f"  {sizes.document_tokens:,} tokens, the last window of each layer kept ({share})")
    else:
        say(f"  {sizes.document_tokens:,} tokens, {sizes.kept:,} entries kept per KV head ({share})")


def _names(target: Target) -> dict[str, Any]:
    return {"file": None if target.path is None else str(target.path), "document": target.document}


def _about(model: Model, target: Target, job: Job, sizes: Report | Estimate, file_bytes: int) -> dict[str, Any]:
    """What the JSON of a document written and of an estimate have in common."""
    return _names(target) | {
        "model": model.id,
        "method": job.settings.method,
        "observer": job.settings.observe,
        "budget": job.settings.budget,
        "kv_dtype": job.settings.kv_dtype,
        "zstd": job.settings.zstd,
        "document_tokens": sizes.document_tokens,
        "truncated_from": sizes.document_tokens_before_truncation,
        "kept_entries": sizes.kept_entries,
        "full_entries": sizes.full_entries,
        "file_bytes": file_bytes,
        "full_cache_bytes": sizes.full_cache_bytes,
    }
