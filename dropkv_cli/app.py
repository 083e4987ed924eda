"""The command line's group: finds the verb, imports its module, and runs it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

import click
from click.core import ParameterSource

from dropkv import __version__
from dropkv.errors import DropkvError
from dropkv_cli.endings import guarded
from dropkv_cli.output import safe_streams, say
from dropkv_cli.shells import complete_files
from dropkv_cli.variables import blamed, give_variables, misspelt

PROGRAM = "dropkv"
COMPLETING = f"_{PROGRAM.upper()}_COMPLETE"  # set while a shell asks what the Tab key may offer
VERBS = ("compress", "query", "serve", "info", "verify", "shrink", "models", "push", "pull", "bench", "completion")


class Verbs(click.Group):
    """A group whose verbs are the modules of this package, each imported when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which they are used, not in that of the alphabet."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb's module; an unknown verb is a usage error that names them all."""
        if cmd_name not in VERBS:
            return None if ctx.resilient_parsing else ctx.fail(f"no such command {cmd_name!r}: use {', '.join(VERBS)}")
        return find_command(cmd_name)


def find_command(verb: str) -> click.Command:
    """A verb's command, its options tied to their variables and its file arguments to the shell's completion."""
    command: click.Command = import_module(f"dropkv_cli.{verb}").command
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
    return guarded(lambda: _main(arguments), arguments)


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
