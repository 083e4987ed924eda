"""`dropkv bench speed`: seconds and memory of compressing and of answering, beside transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from dropkv.bench.speed.plan import OBSERVERS, SIDES, SpeedPlan
from dropkv.errors import UsageError
from dropkv.method_names import method_file, method_files
from dropkv_cli.bench.options import count_option, folder_option, list_option, parts_of, share_of
from dropkv_cli.interrupts import import_compiler
from dropkv_cli.options import DEFAULT_MODEL, device_options, given, json_option, model_aliases
from dropkv_cli.output import json_line, result, say
from dropkv_cli.progress import waiting
from dropkv_cli.shells import offer

DEFAULTS = SpeedPlan()


def _method_names() -> Iterable[str]:
    return sorted(method_files())


def _shape_names() -> list[str]:
    from dropkv.bench.speed.shapes import SHAPES

    return list(SHAPES)


@click.command("speed", short_help="Measure seconds and memory, beside transformers.")
@folder_option
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar="MODEL",
    shell_complete=offer(names=model_aliases, files=True),
    help="Alias, Hub id or local folder.",
)
@click.option(
    "--shape",
    default=None,
    show_default="none: --model",
    metavar="SHAPE",
    shell_complete=offer(names=_shape_names),
    help="In the place of a model, random weights in the shape of mistral-7b, llama-3.1-8b, qwen2.5-7b or smollm2-135m; nothing is fetched.",
)
@list_option(DEFAULTS, "lengths", "Document tokens, template head included.")
@list_option(DEFAULTS, "budgets", "Shares of the tokens that are kept.")
@list_option(DEFAULTS, "batch_sizes", "Questions that are answered at once.")
@list_option(
    DEFAULTS,
    "methods",
    "Methods; full keeps everything in a file.",
    _method_names,
    unset="what compress takes with these observers",
)
@list_option(DEFAULTS, "observers", "Observers of compressing; files are made with the first.", lambda: OBSERVERS)
@list_option(DEFAULTS, "sides", f"{' or '.join(SIDES)}: what is measured.", lambda: SIDES)
@count_option(DEFAULTS, "repeat", "Runs of each cell, whose medians are shown; one more before them warms up.")
@count_option(DEFAULTS, "question_tokens", "Tokens of a question.")
@count_option(DEFAULTS, "answer_tokens", "Tokens of an answer.")
@count_option(DEFAULTS, "chunk", "Document tokens that one replay repeats.")
@count_option(DEFAULTS, "window", "Observation queries per query head of the observer tail.")
@device_options
@json_option
def command(
    output: str,
    model: str,
    shape: str | None,
    dtype: str,
    device: str,
    revision: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure what compressing and answering take, and what transformers takes with its full cache in the same run.

    Compressing: seconds of prefill and score and the memory peak, beside transformers' prefill. Answering: from the file to the first token,
    a decode step, all of it, tokens a second and the memory peak, beside transformers with its dynamic cache. Where memory runs out, the
    table says so. Lines with machine and versions are kept in FOLDER; `dropkv bench report FOLDER` makes a page of them.
    """
    if shape is not None and given("model"):
        raise UsageError("a model and a shape are two networks: use --model or --shape, not both")
    plan = SpeedPlan(**{name: _value(name, value) for name, value in options.items()})
    if shape is not None:
        from dropkv.bench.speed.shapes import check_shape

        check_shape(shape)
    for method, _ in plan.cells:
        method_file(method)
    import_compiler()
    from dropkv.bench.speed.run import lines_of, open_results, run_speed

    results = open_results(output)
    with results.writing():
        if shape is not None:
            from dropkv.bench.speed.shapes import build_shape

            waiting(f"making {shape} ...")
            loaded = build_shape(shape, dtype=dtype, device=device)
        else:
            from dropkv.models import load_model

            waiting(f"loading {model} ...")
            loaded = load_model(model, revision=revision, dtype=dtype, device=device, note=say)
        run_speed(loaded, plan, results, say)
    lines = lines_of(loaded, plan, results)
    if as_json:
        for line in lines:
            json_line(line)
    else:
        from dropkv.bench.speed.text import speed_tables

        result(speed_tables(lines))


def _value(name: str, value: Any) -> Any:
    if value is None or not isinstance(getattr(DEFAULTS, name), tuple):
        return value
    parts = parts_of(value)
    if name in ("lengths", "batch_sizes"):
        return tuple(_whole(part, name) for part in parts)
    return tuple(share_of(part) for part in parts) if name == "budgets" else tuple(parts)


def _whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit():
        option = name.replace("_", "-")
        what = option.replace("-", " ").removesuffix("s")
        raise UsageError(f"{what} {text[:40]!r} is no whole number: use --{option} {getattr(DEFAULTS, name)[0]}")
    return int(text[:18])
