"""Every ending of a command becomes an exit code and at most one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeGuard

import click

from dropkv.errors import MORE_MEMORY, DropkvError, out_of_memory
from dropkv_cli.interrupts import Ended, cleaned_up
from dropkv_cli.main import interrupted
from dropkv_cli.output import complain, failure_keys, forget, json_line
from formats.errors import ExistingFile, FormatError, show_path


class CtrlC:
    """Remembers Ctrl-C, beside what Python does about it, while the block runs."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> None:
        # Whoever started us may want Ctrl-C ignored, as a shell does for background jobs: only Python's own way is wrapped.
        self.ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self.ours:
            signal.signal(signal.SIGINT, self._press)

    def __exit__(self, *ended: object) -> None:
        if self.ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.default_int_handler(number, frame)


def guarded(
    action: Callable[[], object],
    arguments: Sequence[str] = (),
    names: Callable[[], dict[str, Any] | None] = lambda: None,
) -> int:
    """Run `action`, which was asked for by `arguments`; whatever it raises becomes an exit code and one line on standard error.

    names: called after a failure, gives what a line of JSON says of the request beside error and exit; None for no such line.
    With DROPKV_DEBUG=1 the traceback stands before the line.
    """

    def failed(line: str, code: int) -> int:
        complain(line)
        with contextlib.suppress(Exception):  # such as no memory for this either; the line that people read is out
            about = names()
            if about is not None:
                json_line(about | failure_keys(line, code))
        return code

    ctrl_c = CtrlC()
    try:
        with ctrl_c, cleaned_up():
            result = action()
        return result if isinstance(result, int) else 0
    except Ended as signalled:
        signalled.die()
        return 1
    except (click.Abort, KeyboardInterrupt):
        return interrupted(arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        _trace()
        return failed(_usage(error, arguments), error.exit_code)
    except (DropkvError, FormatError) as error:
        _trace()
        return failed(_advised(error), error.exit_code)
    except BrokenPipeError:
        forget(sys.stdout)
        return 1
    except Exception as error:
        if ctrl_c.pressed and isinstance(error, ImportError | SystemError | RecursionError):
            return interrupted(arguments)  # a library whose import was stopped says so in its own words
        _trace()
        unwritable = _unwritable(error)
        if unwritable:
            complain(unwritable)
            return 1
        return failed(failure(error), 1)


def failure(error: Exception) -> str:
    """What to say of an error that ends one piece of work; nothing where standard output has failed, which ends all of it."""
    if isinstance(error, DropkvError | FormatError):
        return _advised(error)
    if _passed_output(error):
        return ""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's; not imported for its name alone
        return "the GPU ran out of memory: use --device cpu, a smaller model or a shorter document"
    if "can't start new thread" in text:
        return "no thread can be started: close other programs, or raise the limits on memory and processes (`ulimit -v -u`)"
    if out_of_memory(error):
        return f"out of memory: {MORE_MEMORY} or a shorter document"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    what = f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
    return f"unexpected {what}; run it again with DROPKV_DEBUG=1 for details and report them"


def _advised(error: DropkvError | FormatError) -> str:
    """The line of an error, with the options of the command line where the library names its arguments."""
    if isinstance(error, ExistingFile) and error.fix == ExistingFile.default_fix:
        error.fix = "choose another name with -o, or replace it with --force"
    return str(error)


def _usage(error: click.ClickException, arguments: Sequence[str]) -> str:
    """One line with the command whose help tells more, or with the way to name a file that looks like an option."""
    context = getattr(error, "ctx", None)
    advice = f" (see {context.command_path} --help)" if context else ""
    if isinstance(error, click.exceptions.NoSuchOption):
        files = [argument for argument in arguments if argument.startswith("-") and os.path.lexists(argument)]
        if files:
            advice = f" (for the file of that name write ./{show_path(files[0])})"
    return f"{error.format_message().rstrip('.')}{advice}"


def _unwritable(error: Exception) -> str:
    """What to say when it was standard output that failed, else nothing. All that is printed passes through click.echo."""
    if not _passed_output(error):
        return ""
    forget(sys.stdout)
    return f"standard output cannot be written ({error.strerror}): send it to another file, or to a terminal"


def _passed_output(error: Exception) -> TypeGuard[OSError]:
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, OSError) and click.echo.__code__ in frames


def _trace() -> None:
    if os.environ.get("DROPKV_DEBUG") == "1":
        traceback.print_exc()
