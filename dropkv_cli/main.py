"""The `dropkv` command: finds the verb, runs it, and turns every ending into an exit code and at most one line."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

import click

from dropkv import __version__
from dropkv.errors import DropkvError
from dropkv_cli.output import complain, safe_streams
from formats.errors import FormatError

VERBS = ("compress", "query", "info", "verify", "models", "bench")
INTERRUPTED = 130


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


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: run the command line and exit.

    Exit codes: 0 done, 1 an expected failure that its one line explains, 2 usage, 130 Ctrl-C.
    """
    safe_streams()
    sys.exit(guarded(lambda: cli.main(args=arguments, prog_name="dropkv", standalone_mode=False)))


def guarded(action: Callable[[], object]) -> int:
    """Run `action`; whatever it raises becomes an exit code and one line on standard error.

    With DROPKV_DEBUG=1 the traceback stands before the line.
    """
    try:
        result = action()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _usage(error)
    except (DropkvError, FormatError) as error:
        _trace()
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        return _reader_left()
    except MemoryError:
        _trace()
        complain("out of memory: use a smaller model, a shorter document, or --dtype bfloat16")
        return 1
    except Exception as error:
        _trace()
        complain(_unexpected(error))
        return 1


def _usage(error: click.ClickException) -> int:
    """One line with the command whose help tells more."""
    _trace()
    context = getattr(error, "ctx", None)
    advice = f" (see {context.command_path} --help)" if context else ""
    complain(f"{error.format_message().rstrip('.')}{advice}")
    return error.exit_code


def _reader_left() -> int:
    """The reader of our output (such as head) has gone: nobody is left to tell, and Python must not at exit either."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: standard output is no real file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _unexpected(error: Exception) -> str:
    if type(error).__name__ == "OutOfMemoryError":  # torch's; not imported for its name alone
        return "the GPU ran out of memory: use --device cpu, a smaller model or a shorter document"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    what = f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
    return f"unexpected {what}; run it again with DROPKV_DEBUG=1 for details and report them"


def _trace() -> None:
    if os.environ.get("DROPKV_DEBUG") == "1":
        traceback.print_exc()
