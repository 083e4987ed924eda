"""The command line's group: finds the verb, imports its module, and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import click

from dropkv import __version__
from dropkv_cli.endings import guarded
from dropkv_cli.output import safe_streams

VERBS = ("compress", "query", "info", "verify", "shrink", "models", "push", "pull", "bench")


class Verbs(click.Group):
    """A group whose verbs are the modules of this package, each imported when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which they are used, not in that of the alphabet."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb's module; an unknown verb is a usage error that names them all."""
        if cmd_name not in VERBS:
            return None if ctx.resilient_parsing else ctx.fail(f"no such command {cmd_name!r}: use {', '.join(VERBS)}")
        command: click.Command = import_module(f"dropkv_cli.{cmd_name}").command
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="dropkv", message="%(prog)s %(version)s")
def cli() -> None:
    """Read a long document once, keep the part of its KV cache that matters, answer many questions from the small file.

    \b
    dropkv compress book.txt -o book.kv --budget 0.25
    dropkv query book.kv "Who is the killer?"
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command line; gives the exit code."""
    safe_streams()
    return guarded(lambda: cli.main(args=list(arguments), prog_name="dropkv", standalone_mode=False), arguments)
