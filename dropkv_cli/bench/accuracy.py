"""`dropkv bench accuracy`: ask every method at every budget the same questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from dropkv.bench.plan import GROUPS, SETTINGS, AccuracyPlan, expand_methods
from dropkv.errors import UsageError
from dropkv_cli.interrupts import import_compiler
from dropkv_cli.options import budget, device_options, given, json_option, model_aliases, seed
from dropkv_cli.output import json_line, result, say
from dropkv_cli.progress import waiting
from dropkv_cli.shells import offer, offer_list

DEFAULTS = AccuracyPlan()
LISTS = ("tasks", "lengths", "methods", "budgets", "observers", "settings")


def _list_option(name: str, help: str, names: Callable[[], Iterable[str]] = tuple) -> Callable[[Any], Any]:
    shown = ",".join(map(str, getattr(DEFAULTS, name)))
    return click.option(
        f"--{name}", default=shown, show_default=True, metavar="A,B,..", shell_complete=offer_list(names), help=help
    )


def _task_names() -> list[str]:
    from dropkv.bench.tasks import names

    return [*GROUPS, *names()]


def _count_option(name: str, help: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}",
        type=click.IntRange(1),
        default=getattr(DEFAULTS, name),
        show_default=True,
        metavar="N",
        help=help,
    )


@click.command("accuracy", short_help="Ask every method at every budget the same questions.")
@click.argument("plan", metavar="[PLAN.toml]", required=False)
@click.option(
    "-o",
    "--output",
    required=True,
    show_default="none",
    metavar="FOLDER",
    help="Folder of the result lines; a run goes on where the last one stopped.",
)
@_list_option("tasks", "Tasks, or `all-ruler`, `all-needle`; `dropkv bench tasks` lists them.", _task_names)
@_list_option("lengths", "Document tokens, template head included.")
@_list_option(
    "methods", "Methods and the controls full, random, no-document, random-answer.", lambda: expand_methods(["all"])
)
@_list_option("budgets", "Shares of the tokens that are kept.")
@_list_option("observers", "Observers of the question-free setting.", lambda: DEFAULTS.observers)
@_list_option("settings", f"{' or '.join(SETTINGS)}: whether the question is known when compressing.", lambda: SETTINGS)
@_count_option("samples", "Documents of each task and length.")
@click.option("--seed", type=seed, default=DEFAULTS.seed, show_default=True, metavar="N", help="Seed of the documents.")
@_count_option("chunk", "Document tokens that one replay repeats.")
@_count_option("window", "Observation queries per query head of the observer tail and of known questions.")
@_count_option("batch", "Documents answered at once.")
@click.option(
    "--essay",
    default=None,
    show_default="the help texts of Python",
    metavar="FILE",
    help="A text for the tasks that hide facts in prose.",
)
@click.option(
    "--data", default=None, show_default="none", metavar="FOLDER", help="Files of the tasks that cannot be generated."
)
@click.option(
    "--model",
    default=DEFAULTS.model,
    show_default=True,
    metavar="MODEL",
    shell_complete=offer(names=model_aliases, files=True),
    help="Alias, Hub id or local folder.",
)
@device_options
@json_option
def command(
    plan: str | None,
    output: str,
    dtype: str,
    device: str,
    revision: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Ask every method at every budget the same questions, and keep one line per answer in FOLDER.

    What to run comes from the options, or from a TOML file whose keys are their names; an option that is given wins over
    the file. `dropkv bench report FOLDER` makes a page of the results.
    """
    chosen = _chosen(plan, options)
    import_compiler()
    _check_names(chosen)
    from dropkv.bench.results import Results

    results = Results(output)
    waiting(f"loading {chosen.model} ...")
    from dropkv.bench.accuracy import lines_of, run_accuracy
    from dropkv.models import load_model

    loaded = load_model(chosen.model, revision=revision, dtype=dtype, device=device, note=say)
    run_accuracy(loaded, chosen, results, say)
    lines = lines_of(loaded, chosen, results)
    if as_json:
        for line in lines:
            json_line(line)
    else:
        from dropkv.bench.text import accuracy_tables

        result(accuracy_tables(lines))


def _chosen(plan: str | None, options: dict[str, Any]) -> AccuracyPlan:
    """The plan: the file's keys, and over them the options that were written."""
    from dropkv.bench.plan import make_plan, read_plan

    values = {name: _value(name, value) for name, value in options.items() if given(name)}
    return read_plan(plan, **values) if plan else make_plan(**values)


def _value(name: str, value: Any) -> Any:
    if name not in LISTS:
        return value
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    if name == "lengths":
        return [_whole(part) for part in parts]
    return [share_of(part) for part in parts] if name == "budgets" else parts


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"length {text!r} is no whole number: use --lengths 1024,2048")
    return int(text)


def share_of(text: str) -> float:
    """A budget of a bench as written. Raises UsageError for a number of entries, BudgetError."""
    share = budget(text)
    if isinstance(share, int):
        raise UsageError(f"budget {text} is a number of entries: benches take shares such as --budgets 0.05,0.25")
    return share


def _check_names(plan: AccuracyPlan) -> None:
    """Raise UsageError or DocumentError for what would stop the run, before the model is loaded."""
    from dropkv.bench.tasks import get, names

    plan.check_methods()
    if plan.essay is not None:
        from dropkv.documents import read_document

        read_document(plan.essay)
    known, lacking = names(), []
    for name in plan.tasks:
        try:
            get(name, data=plan.data, essay=plan.essay)
        except UsageError as error:
            if name not in known:
                raise
            lacking.append(error)  # its data is not there: the run passes over it
    if lacking and len(lacking) == len(plan.tasks):
        raise lacking[0]
