"""Options that several verbs share, and the spelling of a budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from dropkv.errors import BudgetError, UsageError
from dropkv.settings import ZSTD_LEVELS, check_budget
from dropkv_cli.output import say
from dropkv_cli.shells import offer

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_MODEL = "smollm2-135m"


def budget(text: object) -> float | int:
    """A budget as written: 0.05 is a share of the tokens (1.0 is all), 2048 a number of entries per KV head (1 is one).

    Raises BudgetError.
    """
    digits = str(text).strip()
    if re.fullmatch(r"[+-]?[0-9]{1,18}", digits):
        number: float | int = int(digits)
    elif re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+)", digits):
        number = float(digits)
    elif share := re.fullmatch(r"([0-9]{1,3}(\.[0-9]*)?) ?%", digits):
        written = f"--budget {float(share[1]) / 100:.4} (a number such as 2048 is one of entries)"
        raise BudgetError(f"budget {digits!r} is no number: write a share with a decimal point, {written}")
    elif re.fullmatch(r"[0-9]{19,}", digits):
        raise BudgetError(f"budget {digits[:40]} is more than any document has: use 1.0 to keep everything")
    else:
        raise BudgetError(
            f"budget {digits!r} is no number: use a fraction such as 0.05 or a whole number of entries such as 2048"
        )
    check_budget(number)
    return number


def note_budget(number: float | int | None, tokens: int, shown: str) -> None:
    """Say that a number of entries is more than a document has; shown: its name for messages."""
    if isinstance(number, int) and number > tokens:
        say(f"note: {shown} has {tokens:,} tokens, --budget {number:,} keeps everything")


def seed(text: object) -> int:
    """A seed as written. Raises UsageError for what is no whole number from 0 on."""
    digits = str(text).strip()
    if not re.fullmatch(r"[0-9]{1,18}", digits):
        raise UsageError(f"seed {digits!r} is no seed: use a whole number from 0 on, of at most 18 digits")
    return int(digits)


def zstd_level(text: object) -> int:
    """A level as written; CompressSettings knows the range. Raises UsageError for what is no whole number."""
    digits = str(text).strip()
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", digits):
        low, high = ZSTD_LEVELS
        raise UsageError(f"zstd level {digits!r} is no number: use a whole number from {low} to {high}")
    return int(digits)


def check_text(text: str, what: str) -> None:
    """Raise UsageError for text of the command line that is not in the encoding of the terminal."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{what} is no valid UTF-8: check the encoding of the terminal or script") from None


def given(name: str) -> bool:
    """Whether the current command's option of that name was written, not left at its default."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def model_aliases() -> list[str]:
    """The aliases of `dropkv models`, for completion."""
    from dropkv.models import catalogue

    return [row.alias for row in catalogue()]


def refuse_empty(value: str | None, what: str, advice: str) -> None:
    """Raise UsageError for an option or argument that is there and empty, as an unset variable of a script leaves it."""
    if value == "":
        raise UsageError(f"{what} is empty: {advice}")


def refuse_pipe(file: str) -> None:
    """Raise UsageError for "-": a .kv file is read in pieces, in any order. Nor is there a file without a name."""
    if not file:
        raise UsageError("the file has an empty name: name a .kv file")
    if file == "-":
        raise UsageError("a .kv file cannot be read from a pipe: name the file, or ./- for a file of that name")


def device_options(command: Command) -> Command:
    """--dtype, --device and --revision."""
    for option in reversed(
        (
            click.option(
                "--dtype",
                default="auto",
                show_default=True,
                metavar="TYPE",
                shell_complete=offer("auto", "float32", "bfloat16", "float16"),
                help="Type to compute in: float32, bfloat16, float16; auto is float32 on a CPU, else the model's own.",
            ),
            click.option(
                "--device",
                default="auto",
                show_default=True,
                metavar="DEVICE",
                shell_complete=offer("auto", "cpu", "cuda"),
                help="Where to compute: cpu, cuda, cuda:1, or several GPUs as cuda:0,cuda:1; auto is one GPU if the model fits onto it, "
                "else all of them, and the CPU where there is none.",
            ),
            click.option(
                "--revision",
                default=None,
                show_default="the newest, or the one the file names",
                metavar="REV",
                help="Branch, tag or commit of a Hub model.",
            ),
        )
    ):
        command = option(command)
    return command


def model_of_file_option(left_out: str, help: str) -> Callable[[Command], Command]:
    """--model of what is asked of .kv files; left_out: which model it is without."""
    return click.option(
        "--model",
        default=None,
        show_default=left_out,
        metavar="MODEL",
        shell_complete=offer(names=model_aliases, files=True),
        help=help,
    )


def smaller_budget_option(left_out: str, help: str) -> Callable[[Command], Command]:
    """--budget of what is asked of .kv files; left_out: which budget it is without."""
    return click.option("--budget", type=budget, default=None, show_default=left_out, metavar="NUMBER", help=help)


def batch_size_option(help: str) -> Callable[[Command], Command]:
    """--batch-size."""
    return click.option(
        "--batch-size",
        type=int,
        default=None,
        show_default="what fits into memory, at most 64",
        metavar="N",
        help=help,
    )


def json_option(command: Command) -> Command:
    """--json."""
    return flag("--json", "as_json", help="Print one JSON object per line and nothing else.")(command)


def flag(*names: str, help: str) -> Callable[[Command], Command]:
    """An option without a value, off unless it is given; the help says so, which click leaves out for flags."""
    return click.option(*names, is_flag=True, show_default="off", help=help)
