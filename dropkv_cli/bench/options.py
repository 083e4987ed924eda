"""Options that several benches share, and the spelling of their lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from dropkv.errors import UsageError
from dropkv_cli.options import Command, budget
from dropkv_cli.shells import offer_list


def list_option(
    defaults: object, name: str, help: str, names: Callable[[], Iterable[str]] = tuple, *, unset: str | None = None
) -> Callable[[Any], Any]:
    """An option of values with commas between, for a field of a plan; names: what completion offers; unset: what None means, where the plan
    finds a value of its own."""
    shown = ",".join(map(str, getattr(defaults, name)))
    return click.option(
        f"--{name.replace('_', '-')}",
        default=shown if unset is None else None,
        show_default=unset or True,
        metavar="A,B,..",
        shell_complete=offer_list(names),
        help=help,
    )


def count_option(defaults: object, name: str, help: str) -> Callable[[Any], Any]:
    """An option of a whole number of at least 1, for a field of a plan."""
    return click.option(
        f"--{name.replace('_', '-')}",
        type=click.IntRange(1),
        default=getattr(defaults, name),
        show_default=True,
        metavar="N",
        help=help,
    )


def folder_option(command: Command) -> Command:
    """--output, the folder of a bench that can go on."""
    return click.option(
        "-o",
        "--output",
        required=True,
        show_default="none",
        metavar="FOLDER",
        help="Folder of the result lines; a run goes on where the last one stopped.",
    )(command)


def parts_of(value: object) -> list[str]:
    """The values of a list as written."""
    return [part.strip() for part in str(value).split(",") if part.strip()]


def share_of(text: str) -> float:
    """A budget of a bench as written. Raises UsageError for a number of entries, BudgetError."""
    share = budget(text)
    if isinstance(share, int):
        raise UsageError(f"budget {text} is a number of entries: benches take shares such as --budgets 0.05,0.25")
    return share
