"""`dropkv bench accuracy`: ask every method at every budget the same questions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dropkv.bench.plan import GROUPS, SETTINGS, AccuracyPlan, expand_methods
from dropkv.errors import UsageError
from dropkv_cli.bench.options import count_option, folder_option, list_option, parts_of, share_of
from dropkv_cli.interrupts import import_compiler
from dropkv_cli.options import device_options, given, json_option, model_aliases, seed
from dropkv_cli.output import json_line, result, say
from dropkv_cli.progress import counting, waiting
from dropkv_cli.shells import offer
from formats.errors import show_path

if TYPE_CHECKING:
    from dropkv.bench.results import Results
    from dropkv.models import Model

DEFAULTS = AccuracyPlan()
LISTS = ("tasks", "lengths", "methods", "budgets", "observers", "settings")


def _task_names() -> list[str]:
    from dropkv.bench.tasks import names

    return [*GROUPS, *names()]


@click.command("accuracy", short_help="Ask every method at every budget the same questions.")
@click.argument("plan", metavar="[PLAN.toml]", required=False)
@folder_option
@list_option(
    DEFAULTS,
    "tasks",
    "Tasks, or a group: all-needle, all-ruler, all-longbench; `dropkv bench tasks` lists them.",
    _task_names,
)
@list_option(DEFAULTS, "lengths", "Document tokens, template head included.")
@list_option(
    DEFAULTS,
    "methods",
    "Methods and the controls full, random, no-document, random-answer.",
    lambda: expand_methods(["all"]),
)
@list_option(DEFAULTS, "budgets", "Shares of the tokens that are kept.")
@list_option(DEFAULTS, "observers", "Observers of the question-free setting.", lambda: DEFAULTS.observers)
@list_option(
    DEFAULTS, "settings", f"{' or '.join(SETTINGS)}: whether the question is known when compressing.", lambda: SETTINGS
)
@count_option(DEFAULTS, "samples", "Documents of each task and length.")
@click.option("--seed", type=seed, default=DEFAULTS.seed, show_default=True, metavar="N", help="Seed of the documents.")
@count_option(DEFAULTS, "chunk", "Document tokens that one replay repeats.")
@count_option(DEFAULTS, "window", "Observation queries per query head of the observer tail and of known questions.")
@count_option(DEFAULTS, "batch", "Documents answered at once.")
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
    able = _able(chosen)
    from dropkv.bench.results import Results

    results = Results(output)
    import_compiler()
    _say_left_out(able)
    from dropkv.bench.accuracy import run_accuracy
    from dropkv.bench.coverage import lines_of

    measured = _whole_folder(able, results, revision, dtype, device)
    if measured is None:
        from dropkv.models import load_model

        with results.writing():
            waiting(f"loading {chosen.model} ...")
            measured = load_model(chosen.model, revision=revision, dtype=dtype, device=device, note=say)
            with counting("documents", lines=not as_json) as (count, tell):
                run_accuracy(measured, able, results, tell, progress=count)
    lines = lines_of(measured, chosen, results)
    if as_json:
        for line in lines:
            json_line(line)
    else:
        from dropkv.bench.text import accuracy_tables

        result(accuracy_tables(lines))


def _say_left_out(plan: AccuracyPlan) -> None:
    """Name the methods that the plan cannot ask. Raises UsageError where it asks none."""
    from dropkv.bench.cells import left_out
    from dropkv.errors import UsageError

    names = left_out(plan)
    wanted = "observe with replays alone: use --observers replay and --settings question-free"
    if names and len(names) == len(plan.methods):
        raise UsageError(f"{', '.join(names)} {wanted}")
    if names:
        say(f"note: left out are {', '.join(names)}, which {wanted}")


def _whole_folder(plan: AccuracyPlan, results: Results, revision: str | None, dtype: str, device: str) -> Model | None:
    """The model without its weights where the folder holds all that a plan asks for, so that there is nothing to measure; else None."""
    from dropkv.bench.coverage import is_measured, may_be_measured

    if not may_be_measured(plan, results):
        return None
    from dropkv.models import load_outline

    outline = load_outline(plan.model, revision=revision, dtype=dtype, device=device)
    if not is_measured(outline, plan, results):
        return None
    say(f"nothing to measure: {show_path(results.path.parent)} holds every line of this plan")
    return outline


def _chosen(plan: str | None, options: dict[str, Any]) -> AccuracyPlan:
    """The plan: the file's keys, and over them the options that were written."""
    from dropkv.bench.plan import make_plan, read_plan

    values = {name: _value(name, value) for name, value in options.items() if given(name)}
    return read_plan(plan, **values) if plan else make_plan(**values)


def _value(name: str, value: Any) -> Any:
    if name not in LISTS:
        return value
    parts = parts_of(value)
    if name == "lengths":
        return [_whole(part) for part in parts]
    return [share_of(part) for part in parts] if name == "budgets" else parts


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"length {text!r} is no whole number: use --lengths 1024,2048")
    return int(text)


def _able(plan: AccuracyPlan) -> AccuracyPlan:
    """The plan with the tasks that can run here; what the others lack is said, once for each reason, before anything slow begins.

    Raises UsageError or DocumentError for what would stop the run.
    """
    from dropkv.bench.tasks import lacking

    plan.check_methods()
    if plan.essay is not None:
        from dropkv.documents import read_document

        read_document(plan.essay)
    found = lacking(plan.tasks, data=plan.data, essay=plan.essay)
    unable = [name for names in found.values() for name in names]
    if len(unable) == len(plan.tasks):
        raise UsageError("; ".join(f"{', '.join(names)}: {reason}" for reason, names in found.items()))
    for reason, names in found.items():
        say(f"skipped: {', '.join(names)}: {reason}")
    return replace(plan, tasks=tuple(name for name in plan.tasks if name not in unable))
