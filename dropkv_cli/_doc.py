"""docs/commands.md, made of the commands: `python -m dropkv_cli._doc > docs/commands.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from dropkv_cli.app import PROGRAM, VERBS, find_command

HEAD = """\
# Commands

This page is made of the help texts by `make docs`; `dropkv COMMAND --help` prints the same.

Answers and results go to standard output, all else to standard error; with `--json` every line of standard output is one JSON
object. Exit codes: 0 done, 1 a failure that its one line explains (a file or model that is missing, damaged, or does not fit), 2 a
command line that cannot be meant, 130 Ctrl-C.

With `--json` a failure is such an object, too: `error` is what standard error says, `exit` the code it leads to, and beside them stands
what it is about (`file`, `document`, `question`, ...). When one of several documents or questions fails, the others have their usual
objects. Ctrl-C, and standard output that cannot be written, leave none.

The default of an option can be set by the variable that stands beside it. Options without one are written where they are meant:
they are about a single run, or give up a safeguard. An empty variable counts as none. `DROPKV_CACHE` names the folder of converted
models (empty: none are kept), and `DROPKV_DEBUG=1` shows where an error comes from.
"""


def page() -> str:
    """The text of docs/commands.md."""
    return HEAD + "".join(_section(path, command) for path, command in commands())


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with the words by which it is called."""
    for verb in VERBS:
        command = find_command(verb)
        if isinstance(command, click.Group):
            for name, member in command.commands.items():
                yield f"{verb} {name}", member
        else:
            yield verb, command


def _section(path: str, command: click.Command) -> str:
    context = click.Context(command)
    usage = " ".join((PROGRAM, path, *command.collect_usage_pieces(context)))
    parts = [f"\n## {PROGRAM} {path}\n\n```\n{usage}\n```\n", *map(_paragraph, _paragraphs(command.help or ""))]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    if options:
        parts.append("\n| option | what it does | default | variable |\n|---|---|---|---|\n")
        parts += [_row(option, context) for option in options]
    return "".join(parts)


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n\s*\n", text.strip())]


def _paragraph(text: str) -> str:
    """A paragraph on one line; one whose first line is \\b, which click leaves as it is, as a block of code."""
    if text.startswith("\b"):
        lines = text.splitlines()[1:]
        return "\n```\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"
    return "\n" + _plain(" ".join(text.split())) + "\n"


def _row(option: click.Option, context: click.Context) -> str:
    metavar = "" if option.is_flag else f" {option.make_metavar(context)}"
    names = ", ".join(sorted(option.opts, key=len)) + metavar
    default = option.show_default if isinstance(option.show_default, str) else str(option.default)
    variable = f"`{option.envvar}`" if isinstance(option.envvar, str) else ""
    cells = (f"`{names}`", _plain(option.help or ""), _plain(default), variable)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _plain(text: str) -> str:
    return text.replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
