"""`dropkv compress`: read documents once and write the part of their KV caches that matters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from dropkv.errors import DropkvError, UsageError
from dropkv.method_names import method_file, method_files
from dropkv.settings import DEFAULT_METHOD, KV_DTYPES, WITHOUT_REPLAYS, CompressSettings
from dropkv_cli.compressed import Job, foretell, report_estimate, report_failure, report_result, sum_up
from dropkv_cli.interrupts import import_compiler
from dropkv_cli.options import (
    DEFAULT_MODEL,
    budget,
    check_text,
    device_options,
    flag,
    given,
    json_option,
    model_aliases,
    seed,
    zstd_level,
)
from dropkv_cli.output import say
from dropkv_cli.progress import progress_bar, waiting
from dropkv_cli.shells import offer
from dropkv_cli.targets import Target, check_target, make_folder, plan_targets
from formats.errors import FormatError

if TYPE_CHECKING:
    from dropkv.documents import Document
    from dropkv.models import Model

DEFAULTS = CompressSettings()


@click.command("compress")
@click.argument("documents", metavar="DOC...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE|FOLDER/",
    show_default="none; needed unless --dry-run",
    help="The .kv file to write; for several documents a folder, which gets one file for each and is made if its name ends in /.",
)
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar="MODEL",
    shell_complete=offer(names=model_aliases, files=True),
    help="Alias (see `dropkv models`), Hub id or local folder.",
)
@click.option(
    "--budget",
    type=budget,
    default=DEFAULTS.budget,
    show_default=True,
    metavar="NUMBER",
    help="What is kept: 0.05 (decimal point) is a share of the tokens, 2048 a number of entries per KV head.",
)
@click.option(
    "--method",
    default=None,
    show_default=f"{DEFAULT_METHOD} with replay, else {WITHOUT_REPLAYS}",
    envvar="DROPKV_METHOD",
    metavar="NAME",
    shell_complete=offer(names=method_files),
    help=f"How entries are chosen: {', '.join(sorted(method_files()))}.",
)
@click.option(
    "--observe",
    default=DEFAULTS.observe,
    show_default=True,
    metavar="WHAT",
    shell_complete=offer("replay", "tail", "question:", "questions:"),
    help="Where observation queries come from: replay, the document repeated chunk by chunk; tail, its last tokens; "
    "question:TEXT, the one question that will be asked; questions:FILE, a line for each sample question or description "
    "(lines that start with # are skipped).",
)
@click.option(
    "--system",
    metavar="TEXT",
    default=None,
    show_default="the template's own",
    help="System text that stands before the document; it is kept in the file.",
)
@click.option(
    "--window",
    type=int,
    default=DEFAULTS.window,
    show_default=True,
    metavar="N",
    help="Observation queries per query head with --observe tail.",
)
@click.option(
    "--pool",
    type=int,
    default=None,
    show_default="the method's own",
    metavar="N",
    help="Width of the pooling over neighbouring scores, odd; 1 for none.",
)
@click.option(
    "--alpha",
    type=float,
    default=None,
    show_default="the method's own",
    metavar="SHARE",
    help="Share of the budget that head-adaptive and model-wide methods and auto give to every KV head alike, 0 to 1.",
)
@click.option(
    "--chunk",
    type=int,
    default=DEFAULTS.chunk,
    show_default=True,
    metavar="N",
    help="Document tokens that one replay repeats with --observe replay.",
)
@device_options
@click.option(
    "--kv-dtype",
    default=DEFAULTS.kv_dtype,
    show_default=True,
    metavar="TYPE",
    shell_complete=offer(*KV_DTYPES),
    help="How entries are stored: same, as they were computed; int8, half of 16 bits and nearly as exact; int4, a third, which costs accuracy; "
    "fp8, as large as int8 and less exact.",
)
@click.option(
    "--zstd",
    type=zstd_level,
    default=None,
    show_default="no compression",
    metavar="LEVEL",
    help="Compress the file without loss, 1 (fast) to 22 (small); 3 is a good start.",
)
@flag("--no-tokens", help="Leave the document's token ids out of the file.")
@flag("--truncate", help="Cut a document that does not fit the model's context instead of refusing it.")
@flag("--no-fidelity", help="Do not measure how much the file changes what the model predicts of the document.")
@click.option(
    "--seed", type=seed, default=DEFAULTS.seed, show_default=True, metavar="N", help="Seed of the method random."
)
@flag("--force", help="Replace an output file that exists.")
@flag(
    "--dry-run", help="Print sizes and the memory needed; nothing is written, and the model's weights are not loaded."
)
@json_option
def command(
    documents: tuple[str, ...],
    output: str | None,
    model: str,
    dtype: str,
    device: str,
    revision: str | None,
    no_tokens: bool,
    no_fidelity: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Read documents once and write one small .kv file for each.

    DOC is a text file in UTF-8 (.txt, .md), a folder of them (those in its own folders are left out), or - for standard
    input. Several documents share one load of the model; when one of them fails, the others are still written, and the exit
    code is 1; with --json it gets a line with its error.
    """
    if output is None and not dry_run:
        raise UsageError("name the file to write with -o FILE, or try --dry-run")
    chosen = CompressSettings(keep_tokens=not no_tokens, fidelity=not no_fidelity, **settings)
    _check_settings(chosen)
    job = Job(chosen, force, dry_run, as_json, output or "")
    targets = plan_targets(documents, output)
    todo, failures = _readable(targets, job)
    if todo:
        _note_unused(job.settings)
        import_compiler()
        _check_method(job.settings)
        started = time.perf_counter()
        loaded = _load(model, revision, dtype, device, dry_run)
        load_seconds = time.perf_counter() - started
        _check_system(loaded, job.settings)
        if all(layer.kind == "sliding" for layer in loaded.geometry):
            say(
                f"note: --budget and --method are not used, all layers of {loaded.id} slide: each keeps its last window"
            )
        sizes = []
        for number, (target, document) in enumerate(todo, 1):
            try:
                place = f"{number}/{len(todo)} " if len(todo) > 1 else ""
                sizes.append(_one(loaded, target, document, job, load_seconds, place))
            except (BrokenPipeError, click.ClickException):
                raise
            except Exception as error:
                failures += 1
                report_failure(error, target, job, alone=len(targets) == 1)
            load_seconds = 0.0  # only the first file had to wait for the model
        if len(targets) > 1 and not as_json:
            sum_up(sizes, failures, job)
    return 1 if failures else 0


def _load(name: str, revision: str | None, dtype: str, device: str, dry_run: bool) -> Model:
    """The model; for an estimate without its weights, which may be large, or not be here."""
    if dry_run:
        from dropkv.models import load_outline

        return load_outline(name, revision=revision, dtype=dtype, device=device)
    waiting(f"loading {name} ...")
    from dropkv.models import load_model

    return load_model(name, revision=revision, dtype=dtype, device=device, note=say)


def _readable(targets: list[Target], job: Job) -> tuple[list[tuple[Target, Document]], int]:
    """The documents that can be read and whose files may be written, and how many cannot; no model is loaded."""
    from dropkv.documents import read_document

    todo, failures = [], 0
    for target in targets:
        try:
            check_target(target, force=job.force, new_folder=job.output.endswith("/"))
            todo.append((target, read_document(target.document)))
        except (DropkvError, FormatError) as error:
            failures += 1
            report_failure(error, target, job, alone=len(targets) == 1)
    return todo, failures


def _note_unused(settings: CompressSettings) -> None:
    """Options that were written and that change nothing beside the others."""
    kind = settings.observe.partition(":")[0]
    if given("budget") and settings.method == "full":
        say("note: --budget is not used, --method full keeps everything")
    if given("seed") and settings.method != "random":
        say(f"note: --seed is not used with --method {settings.method}, only with random")
    if given("window") and kind not in ("tail", "question"):
        say(f"note: --window is not used with --observe {kind}, which has queries of its own")
    if given("chunk") and kind != "replay":
        say(f"note: --chunk is not used with --observe {kind}, which replays nothing")


def _check_settings(settings: CompressSettings) -> None:
    """An unknown method, a system text that is none, or a questions file that cannot be read, before anything slow is imported."""
    from dropkv.question_files import read_questions

    assert settings.method is not None  # since the settings were made
    method_file(settings.method)
    kind, _, rest = settings.observe.partition(":")
    if kind == "questions":
        read_questions(rest)
    if settings.system is not None:
        check_text(settings.system, "--system")


def _check_method(settings: CompressSettings) -> None:
    """A method that the observer does not suit, before the model is loaded."""
    from dropkv.compression import ALPHA_RULES, resolve_method

    if resolve_method(settings, 0).rule not in ALPHA_RULES and given("alpha"):
        say(f"note: --alpha is not used with --method {settings.method}, where all heads of a layer have one budget")


def _check_system(model: Model, settings: CompressSettings) -> None:
    """A system text that the template does not take is told once, not for every document."""
    if settings.system is not None:
        from dropkv.prompts import Seam

        Seam.of(model.tokenizer, system=settings.system, name=model.id)


def _one(model: Model, target: Target, document: Document, job: Job, load_seconds: float, place: str) -> int:
    """Compress one document, or estimate it; gives the bytes of its file."""
    from dropkv.compression import compress_document, estimate, resolve_method

    if job.dry_run:
        sizes = estimate(model, document, job.settings)
        report_estimate(sizes, model, target, job)
        return sizes.file_bytes
    started = time.perf_counter()
    readings = resolve_method(job.settings, 0).readings()
    with progress_bar(place + document.name, len(model.geometry), readings) as progress:
        compression = compress_document(
            model, document, job.settings, progress=progress, expect=lambda needed: foretell(model, document, needed)
        )
    assert target.path is not None
    writing = time.perf_counter()
    make_folder(job.output)
    file_bytes = compression.save(target.path, overwrite=job.force)
    ended = time.perf_counter()
    report_result(
        compression, model, target, job, file_bytes, load_seconds, ended - writing, ended - started + load_seconds
    )
    return file_bytes
