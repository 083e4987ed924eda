"""What a command line asked for, read once more and leniently, so that its failure can be told as a line of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from dropkv.errors import DropkvError


def json_names(command: click.Command, arguments: Sequence[str]) -> dict[str, Any] | None:
    """What the failed command was about, under the keys of its JSON lines; None when it was not to print JSON.

    arguments: those behind the command's name. What is wrong with them is passed over.
    """
    rest = list(arguments)
    while isinstance(command, click.Group):
        inner = command.commands.get(rest.pop(0)) if rest else None
        if inner is None:
            return None
        command = inner
    context = command.make_context(None, rest, resilient_parsing=True, ignore_unknown_options=True)
    given: dict[str, Any] = context.params
    if not given.get("as_json"):
        return None
    if command.name in ("compress", "shrink"):
        return _target(command.name, given)
    names = {
        parameter.name: given.get(parameter.name)
        for parameter in command.params
        if isinstance(parameter, click.Argument) and parameter.name is not None and parameter.nargs == 1
    }
    questions: Sequence[str] = given.get("questions") or ()
    if len(questions) == 1 and questions[0][:1] != "-":  # which is standard input, or begins an option that is none
        names["question"] = questions[0]
    return {name: value for name, value in names.items() if value is not None}


def _target(verb: str, given: dict[str, Any]) -> dict[str, Any]:
    """The one input and its file; nothing where there are several, whose own failures have lines of their own."""
    from dropkv_cli.targets import plan_targets

    inputs, noun = ("files", "file") if verb == "shrink" else ("documents", "document")
    with suppress(DropkvError):
        targets = plan_targets(given.get(inputs) or (), given.get("output"), noun)
        if len(targets) == 1:
            path = targets[0].path
            return {
                "file": None if path is None else str(path),
                "source" if verb == "shrink" else noun: targets[0].document,
            }
    return {}
