"""The command line's group: finds the verb, imports its module, and runs it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from dropkv import __version__
from dropkv.errors import DropkvError
from dropkv_cli.endings import guarded
from dropkv_cli.output import safe_streams, say
from dropkv_cli.shells import complete_files
from dropkv_cli.variables import blamed, give_variables, misspelt
from formats.errors import printable

PROGRAM = "dropkv"
COMPLETING = f"_{PROGRAM.upper()}_COMPLETE"  # set while a shell asks what the Tab key may offer
VERBS = {  # with what `dropkv --help` says of each, for which nothing is imported
    "compress": "Read documents once and write one small .kv file for each.",
    "query": "Answer questions from a .kv file, without the document.",
    "serve": "Answer questions on .kv files over HTTP, as OpenAI's API does.",
    "info": "Show what a .kv file holds.",
    "verify": "Check the structure and all checksums of a .kv file.",
    "shrink": "Make a smaller .kv file of one, without model or document.",
    "models": "List the model aliases and whether each is usable offline now.",
    "push": "Upload a checked .kv file to the Hugging Face Hub.",
    "pull": "Fetch a .kv file from the Hugging Face Hub and check it.",
    "bench": "Compare methods on one machine.",
    "completion": "Print the script for completion at the Tab key.",
}


class Verbs(click.Group):
    """A group whose verbs are the modules of this package, each imported when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which they are used, not in that of the alphabet."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb's module; an unknown verb is a usage error that names them all."""
        if cmd_name not in VERBS:
            if ctx.resilient_parsing:
                return None
            near = get_close_matches(cmd_name.lower(), VERBS, 1)
            advice = f"did you mean {near[0]}?" if near else f"use {', '.join(VERBS)}"
            ctx.fail(f"no such command {printable(repr(cmd_name), 80)}: {advice}")
        return find_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs, a line for each."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def find_command(verb: str) -> click.Command:
    """A verb's command, its options tied to their variables and its file arguments to the shell's completion."""
    command: click.Command = import_module(f"dropkv_cli.{verb}").command
    command.short_help = VERBS[verb]
    give_variables(command, verb)
    complete_files(command)
    return command


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Defaults can be set by variables such as DROPKV_BUDGET: the help of each command names them. DROPKV_CACHE is the "
    "folder of converted models (empty: none), DROPKV_DEBUG=1 shows where an error comes from.",
)
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
def cli() -> None:
    """Read a long document once, keep the part of its KV cache that matters, answer many questions from the small file.

    \b
    dropkv compress book.txt -o book.kv --budget 0.25
    dropkv query book.kv "Who is the killer?"
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command line; gives the exit code."""
    safe_streams()
    return guarded(lambda: _main(arguments), arguments, lambda: _names(arguments))


def _names(arguments: Sequence[str]) -> dict[str, Any] | None:
    """What a failed command line was about, where it was to print JSON."""
    if not arguments or arguments[0] not in VERBS:
        return None
    from dropkv_cli.requests import json_names

    return json_names(find_command(arguments[0]), arguments[1:])


def _main(arguments: Sequence[str]) -> object:
    if COMPLETING not in os.environ:  # what is said then stands between the letters that are being typed
        for line in misspelt(lambda: map(find_command, VERBS)):
            say(line)
    try:
        return cli.main(args=list(arguments), prog_name=PROGRAM, standalone_mode=False)
    except click.BadParameter as error:
        _name_source(error)
        raise
    except DropkvError as error:
        if arguments and arguments[0] in VERBS:
            text = str(error)
            error.args = (text + blamed(find_command(arguments[0]), arguments[1:], text),)
        raise


def _name_source(error: click.BadParameter) -> None:
    """Click names an option's variable whenever it has one: that helps only if the value came from there."""
    option, context = error.param, error.ctx
    if not isinstance(option, click.Option) or option.name is None or context is None:
        return
    if context.get_parameter_source(option.name) is not ParameterSource.ENVIRONMENT:
        error.param_hint = f"'{' / '.join(option.opts)}'"
