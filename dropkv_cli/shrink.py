"""`dropkv shrink`: a smaller budget from a KV file alone."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from dropkv.errors import DropkvError, UsageError
from dropkv.hub.client import Hub
from dropkv.hub.fetch import parts
from dropkv_cli.endings import failure
from dropkv_cli.interrupts import import_torch
from dropkv_cli.options import budget as budget_number
from dropkv_cli.options import flag, json_option, note_budget, refuse_pipe
from dropkv_cli.output import compared, complain, failure_keys, json_line, say, size
from dropkv_cli.targets import Target, check_path, make_folder, plan_targets, refuse_rivals
from formats import read_header
from formats.errors import FormatError, show_path

if TYPE_CHECKING:
    from formats import ShrinkReport


@click.command("shrink")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE|FOLDER/",
    show_default="none; needed",
    help="The .kv file to write; for several files a folder, which gets one file for each.",
)
@click.option(
    "--budget",
    type=budget_number,
    default=None,
    show_default="none; needed",
    metavar="NUMBER",
    help="What is kept: 0.05 (decimal point) is a share of the document's tokens, 2048 a number of entries per KV head.",
)
@flag("--force", help="Replace an output file that exists; it may be FILE itself.")
@json_option
def command(files: tuple[str, ...], output: str | None, budget: float | int | None, force: bool, as_json: bool) -> int:
    """Make smaller .kv files of .kv files: what `compress` keeps at a smaller budget, without model or document.

    --budget means what it means there: a share of the document, not of FILE. Only what is kept is read and checked. A method whose smaller
    budgets are no parts of its larger ones is refused. When one of several files fails, the others are still written, and the exit code
    is 1; with --json it gets a line with its error.
    """
    for file in files:
        refuse_pipe(file)
    if output is None:
        raise UsageError("name the file to write with -o FILE")
    if budget is None:
        raise UsageError("say how much to keep with --budget: 0.05 is a share of the document's tokens, 2048 a number")
    failures = 0
    for target in plan_targets(files, output, "file"):
        try:
            _one(target, output, budget, force, as_json)
        except (DropkvError, FormatError) as error:
            if len(files) == 1:
                raise
            failures += 1
            text = f"{target.shown}: {failure(error).removeprefix(f'{target.shown}: ')}"
            complain(text)
            if as_json:
                json_line(_names(target) | failure_keys(text))
    return 1 if failures else 0


def _one(target: Target, output: str, budget: float | int, force: bool, as_json: bool) -> None:
    assert target.path is not None
    refuse_rivals(target)
    check_path(target.path, force=force, new_folder=output.endswith(os.sep))
    started = time.perf_counter()
    place = parts(target.document, Hub(note=say))
    read_header(place)  # what is no KV file is refused before torch is imported, and before a folder is made
    import_torch()
    from dropkv.shrinking import shrink

    make_folder(output)
    report = shrink(place, budget, target.path, overwrite=force)
    note_budget(budget, report.metadata.document.tokens, target.shown)
    _print(target, report, time.perf_counter() - started, as_json)


def _print(target: Target, report: ShrinkReport, seconds: float, as_json: bool) -> None:
    metadata = report.metadata
    kept, before = (sum(layer.entries for layer in each.layers) for each in (metadata, report.old_metadata))
    full = sum(layer.kv_heads * metadata.document.tokens for layer in metadata.layers)
    if as_json:
        json_line(
            _names(target)
            | {
                "model": metadata.model.id,
                "method": metadata.method.get("name"),
                "observer": metadata.observer.get("name"),
                "budget": metadata.budget.asked,
                "kept": metadata.budget.kept,
                "document_tokens": metadata.document.tokens,
                "kept_entries": kept,
                "entries_before": before,
                "full_entries": full,
                "file_bytes": report.file_bytes,
                "file_bytes_before": report.old_file_bytes,
                "seconds": {"total": seconds},
            }
        )
        return
    say(f"{target.shown} -> {show_path(target.path or '')}")
    say(
        f"  {metadata.budget.kept:,} of {report.old_metadata.budget.kept:,} entries kept per KV head "
        f"({kept:,} of {before:,}, {100 * kept / full:.1f} % of the document's)"
    )
    say(
        f"  {size(report.file_bytes)} on disk, {size(report.old_file_bytes)} before: "
        f"{compared(report.file_bytes, report.old_file_bytes)}"
    )


def _names(target: Target) -> dict[str, Any]:
    return {"file": str(target.path), "source": target.document}
