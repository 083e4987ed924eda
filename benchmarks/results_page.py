"""Write the tables of a page again from the commands that stand above them, or say which of them are not what their commands print.

    python benchmarks/results_page.py docs/results.md [--check]

A table of the page begins below a line `<!-- python benchmarks/... -->` or `<!-- python -m benchmarks.... -->` and ends at the next empty line. Where
the file of benchmarks/lines that a command names is not there yet, its table is `<!-- pending -->`. Run it where the repository begins.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

BEGIN, END = ("<!-- python benchmarks/", "<!-- python -m benchmarks."), " -->"
LINES = "benchmarks/lines/"
PENDING = "<!-- pending -->\n"


def commands_of(page: str) -> list[str]:
    """The commands of a page, as written."""
    return [line[5 : -len(END)] for line in page.splitlines() if line.startswith(BEGIN) and line.endswith(END)]


def renewed(page: str, printed: Callable[[str], str]) -> str:
    """The page with every table as `printed` gives it for its command."""
    made, old = [], False
    for line in page.splitlines():
        old = old and line != ""
        if old:
            continue
        made.append(line)
        if line.startswith(BEGIN) and line.endswith(END):
            made.extend(printed(line[5 : -len(END)]).splitlines())
            old = True
    return "\n".join(made) + "\n"


def waits(command: str, root: Path = Path()) -> bool:
    """Whether the lines that a command reads are yet to be measured."""
    return any(word.startswith(LINES) and not (root / word).exists() for word in shlex.split(command))


def run(command: str) -> str:
    if waits(command):
        return PENDING
    _, *words = shlex.split(command)
    return subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("page", type=Path)
    options.add_argument("--check", action="store_true", help="change nothing; exit 1 where a table is an older one")
    given = options.parse_args()
    page = given.page.read_text(encoding="utf-8")
    new = renewed(page, run)
    if given.check:
        options.exit(
            int(new != page), f"{given.page}: {'write its tables again' if new != page else 'tables are right'}\n"
        )
    given.page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
