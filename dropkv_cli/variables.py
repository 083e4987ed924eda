"""DROPKV_* variables: the default of nearly every option can be set in the environment.

The name is DROPKV_ and the option's, where the option has a default value of its own (DROPKV_BUDGET, DROPKV_DEVICE): one variable then
serves every command. Where the default lies in the file, the model or the method, a value that suits one command would be wrong for
another, so the command is part of the name (DROPKV_QUERY_MODEL).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches

import click

from formats.errors import printable

PREFIX = "DROPKV_"
# What a single run is about, and switches that give up a safeguard or publish something, are written where they are meant.
NEVER = frozenset(
    {"output", "questions-file", "resume", "dry-run", "force", "allow-mismatch", "public", "token", "name"}
)
OTHERS = frozenset({"DROPKV_CACHE", "DROPKV_DEBUG"})  # of no option
BENCH = frozenset({"dtype", "device"})  # figures must not depend on settings that no plan and no command line shows


def give_variables(command: click.Command, verb: str) -> None:
    """Let every option of a command, and of the commands under it, take its default from its variable; help texts show the name."""
    for option in _options(command):
        option.envvar = variable(option, verb)
        option.show_envvar = option.envvar is not None


def variable(option: click.Option, verb: str) -> str | None:
    """The name of an option's variable, None for an option that has none; one that the option itself names stays."""
    if isinstance(option.envvar, str):
        return option.envvar
    word = long_name(option)
    if word in NEVER or (verb == "bench" and word not in BENCH):
        return None
    own = option.is_flag or (isinstance(option.default, str | int | float) and not option.required)
    return PREFIX + ("" if own else f"{verb}-").replace("-", "_").upper() + word.replace("-", "_").upper()


def long_name(option: click.Option) -> str:
    """An option's name as it is typed, without dashes in front."""
    return max(option.opts, key=len).lstrip("-")


def set_variables(command: click.Command, arguments: Sequence[str]) -> dict[str, click.Option]:
    """Variables that are set and not overruled by an option among the arguments, with their options."""
    found = {}
    for option in _options(command):
        name = option.envvar
        written = any(argument.split("=", 1)[0] in option.opts for argument in arguments)
        if isinstance(name, str) and os.environ.get(name) and not written:
            found[name] = option
    return found


def blamed(command: click.Command, arguments: Sequence[str], message: str) -> str:
    """What to say behind an error's message when a variable has set what it speaks of, else nothing."""
    folded = message.casefold()
    names = [
        f"{name} is set to {os.environ[name]!r}"
        for name, option in set_variables(command, arguments).items()
        if os.environ[name].casefold() in folded and long_name(option).replace("-", " ") in folded.replace("-", " ")
    ]
    return f" ({', '.join(names)})" if names else ""


def misspelt(commands: Callable[[], Iterable[click.Command]]) -> list[str]:
    """A line for each DROPKV_ variable that is set and means nothing to any of the commands (called for if there may be one)."""
    unsure = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in OTHERS)
    if not unsure:
        return []
    known = {str(option.envvar) for command in commands() for option in _options(command) if option.envvar} | OTHERS
    return [_misspelt(name, known) for name in unsure if name not in known]


def _misspelt(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in sorted(known)], 1)
    advice = f"did you mean {PREFIX}{near[0]}?" if near else "docs/commands.md and `--help` name those that do"
    return f"note: the variable {printable(name)} means nothing to dropkv; {advice}"


def _options(command: click.Command) -> Iterator[click.Option]:
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _options(command.commands[name])
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield parameter
