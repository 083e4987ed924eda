"""The `dropkv` command. Nothing is imported here but what Python has loaded anyway, so that Ctrl-C is heeded at once."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in typing, which takes a while to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

INTERRUPTED = 130
WRITERS = ("compress", "shrink", "pull", "bench")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: run the command line and exit.

    Exit codes: 0 done, 1 an expected failure that its one line explains, 2 usage, 130 Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from dropkv_cli.app import run

        code = run(arguments)
    except KeyboardInterrupt:
        code = interrupted(arguments)
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:  # what nobody could be told is still in its buffer
        from dropkv_cli.output import forget

        forget(sys.stderr)
    sys.exit(code)


def interrupted(arguments: Sequence[str]) -> int:
    """What is said after Ctrl-C to a command line; gives the exit code."""
    if sys.stderr is not None:
        from contextlib import suppress

        with suppress(OSError):  # nobody is left to tell
            files = "; no file is left half-written" if arguments and arguments[0] in WRITERS else ""
            if list(arguments[:2]) == ["bench", "accuracy"]:
                files += ", and the same command goes on where it was"
            print(f"dropkv: interrupted{files}", file=sys.stderr, flush=True)
    return INTERRUPTED
