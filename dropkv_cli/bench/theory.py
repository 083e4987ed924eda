"""`dropkv bench theory`: how well the assumptions behind the score hold for a model and a document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from dropkv_cli.interrupts import import_compiler
from dropkv_cli.options import DEFAULT_MODEL, budget, device_options, json_option, model_aliases, seed
from dropkv_cli.output import json_line, result, say
from dropkv_cli.progress import progress_bar, waiting
from dropkv_cli.shells import offer
from formats.errors import naming


@click.command("theory", short_help="Measure how well the assumptions of the score hold.")
@click.argument("document", metavar="DOC")
@click.option(
    "--budget",
    "share",
    type=budget,
    default=0.05,
    show_default=True,
    metavar="NUMBER",
    help="What is kept: a share of the tokens with a decimal point, or a number of entries per KV head.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Triples of layer, head and query that are studied.",
)
@click.option("--seed", type=seed, default=0, show_default=True, metavar="N", help="Seed of the sampled triples.")
@click.option(
    "--question",
    default=None,
    show_default="none: the document's last tokens",
    metavar="TEXT",
    help="A question behind the document, whose last tokens are the queries.",
)
@click.option(
    "-o",
    "--output",
    default=None,
    show_default="none",
    metavar="FOLDER",
    help="Folder of results to add the lines to; the same run is replaced.",
)
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar="MODEL",
    shell_complete=offer(names=model_aliases, files=True),
    help="Alias, Hub id or local folder.",
)
@device_options
@json_option
def command(
    document: str,
    share: float | int,
    samples: int,
    seed: int,
    question: str | None,
    output: str | None,
    model: str,
    dtype: str,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Measure cones, bounds and gaps of what DropKV would evict from DOC, a text file or - for standard input.

    The tables are those of the paper, with their numbers; docs/bench.md says what they mean.
    """
    from dropkv.documents import read_document
    from dropkv.prompts import check_question

    text = read_document(document)
    if question is not None:
        check_question(question)
    from dropkv.bench.results import made_folder

    with nullcontext() if output is None else made_folder(output):
        if output is not None:
            _older(Path(output))  # what cannot be added to is found out before the model is loaded
        waiting(f"loading {model} ...")
        import_compiler()
        from dropkv.bench.theory import render_theory, theory_report
        from dropkv.models import load_model

        loaded = load_model(model, revision=revision, dtype=dtype, device=device, note=say)
        with progress_bar(text.name) as progress:
            lines = theory_report(
                loaded, text, budget=share, samples=samples, seed=seed, question=question, progress=progress
            )
        if output is not None:
            _keep(Path(output), lines)
    if as_json:
        for line in lines:
            json_line(line)
    else:
        result(render_theory(lines), newline=False)


def _older(folder: Path) -> list[dict[str, Any]]:
    """The lines that a results folder holds already. Raises ResultsError."""
    from dropkv_cli.bench.lines import THEORY, read_json_lines

    return read_json_lines(folder / THEORY)


def _keep(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines behind the older ones, in one step; a run that stands there already gives way to its repetition."""
    from dropkv.bench.report.theory import RUN
    from dropkv_cli.bench.lines import THEORY
    from formats.temporary import replacing

    mine = [lines[0].get(key) for key in RUN]
    others = [line for line in _older(folder) if [line.get(key) for key in RUN] != mine]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (*others, *lines))
    path = folder / THEORY
    with naming(path), replacing(path, overwrite=True) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "replace"))
