"""`dropkv bench`: compare methods on tasks, measure what the theory says, and make a report of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from dropkv.bench.plan import SETTINGS, AccuracyPlan
from dropkv_cli.options import DEFAULT_MODEL, budget, device_options, json_option
from dropkv_cli.output import json_line, result, say
from dropkv_cli.progress import waiting

DEFAULTS = AccuracyPlan()


@click.group("bench")
def command() -> None:
    """Compare methods on one machine: how often answers stay right, and what the theory's constants are."""


def names(text: str | None) -> tuple[str, ...] | None:
    """A list as written: a,b,c."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _list_option(*flags: str, default: Sequence[object], help: str) -> Callable[[Any], Any]:
    shown = ",".join(map(str, default))
    return click.option(*flags, default=None, show_default=shown, metavar="A,B,..", help=help)


@command.command("accuracy")
@click.argument("plan", metavar="[PLAN.toml]", required=False)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FOLDER",
    help="Folder of the result lines; a run goes on where the last one stopped.",
)
@_list_option(
    "--tasks", default=DEFAULTS.tasks, help="Tasks, or `all-ruler`, `all-needle`; `dropkv bench tasks` lists them."
)
@_list_option("--lengths", default=DEFAULTS.lengths, help="Document tokens, template head included.")
@_list_option(
    "--methods", default=DEFAULTS.methods, help="Methods and the controls full, random, no-document, random-answer."
)
@_list_option("--budgets", default=DEFAULTS.budgets, help="Shares of the tokens that are kept.")
@_list_option("--observers", default=DEFAULTS.observers, help="Observers of the question-free setting.")
@_list_option(
    "--settings",
    default=DEFAULTS.settings,
    help=f"{' or '.join(SETTINGS)}: whether the question is known when compressing.",
)
@click.option(
    "--samples",
    type=int,
    default=None,
    show_default=str(DEFAULTS.samples),
    metavar="N",
    help="Documents of each task and length.",
)
@click.option(
    "--seed", type=int, default=None, show_default=str(DEFAULTS.seed), metavar="N", help="Seed of the documents."
)
@click.option(
    "--batch", type=int, default=None, show_default=str(DEFAULTS.batch), metavar="N", help="Documents answered at once."
)
@click.option(
    "--essay",
    default=None,
    show_default="none",
    metavar="FILE",
    help="A text for the tasks that hide needles in prose.",
)
@click.option(
    "--data", default=None, show_default="none", metavar="FOLDER", help="Files of the tasks that cannot be generated."
)
@click.option(
    "--model", default=None, show_default=DEFAULT_MODEL, metavar="MODEL", help="Alias, Hub id or local folder."
)
@device_options
@json_option
def accuracy(
    plan: str | None,
    output: str,
    model: str | None,
    dtype: str,
    device: str,
    revision: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Ask every method at every budget the same questions, and keep one line per answer in FOLDER.

    What to run comes from the options, or from a TOML file whose keys are their names. `dropkv bench report FOLDER` makes a page of it.
    """
    from dropkv.bench.plan import make_plan, read_plan

    values = {
        name: names(value) if isinstance(value, str) and name not in ("essay", "data") else value
        for name, value in given.items()
    }
    values["lengths"] = None if values["lengths"] is None else tuple(_whole(part) for part in values["lengths"])
    values["budgets"] = None if values["budgets"] is None else tuple(float(budget(part)) for part in values["budgets"])
    values["model"] = model
    chosen = (
        read_plan(plan, **values)
        if plan
        else make_plan(**{name: value for name, value in values.items() if value is not None})
    )
    chosen.check_methods()
    from dropkv.bench.results import Results

    results = Results(output)
    waiting(f"loading {chosen.model} ...")
    from dropkv.bench.accuracy import run_accuracy
    from dropkv.models import load_model

    loaded = load_model(chosen.model, revision=revision, dtype=dtype, device=device)
    run_accuracy(loaded, chosen, results, say)
    if as_json:
        for line in results.read():
            json_line(line)
    else:
        from dropkv.bench.text import accuracy_tables

        result(accuracy_tables(list(results.read())))


def _whole(text: str) -> int:
    from dropkv.errors import UsageError

    if not text.isdigit():
        raise UsageError(f"length {text!r} is no whole number: use --lengths 1024,2048")
    return int(text)


@command.command("tasks")
def tasks() -> None:
    """List the tasks, one a line."""
    from dropkv.bench.tasks import names as task_names

    result("\n".join(task_names()))
