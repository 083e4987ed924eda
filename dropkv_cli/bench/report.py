"""`dropkv bench report`: a results folder as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from dropkv.errors import DropkvError
from dropkv_cli.output import say, size
from formats.errors import naming, show_path

PAGE = "report.html"


@click.command("report")
@click.argument("folder", metavar="FOLDER")
@click.option(
    "-o",
    "--output",
    default=None,
    show_default=f"{PAGE} in FOLDER",
    metavar="FILE.html",
    help="The page to write; an older one is replaced.",
)
def command(folder: str, output: str | None) -> None:
    """Make one HTML page of the results in FOLDER. It loads nothing, so it can be sent and kept as it is."""
    place = Path(folder)
    if not place.is_dir():
        raise DropkvError(f"{show_path(folder)}: no such folder: name the one that `dropkv bench accuracy -o` wrote to")
    from dropkv_cli.bench.lines import LINES, SPEED, THEORY, read_json_lines

    lines = [line for name in (LINES, THEORY, SPEED) for line in read_json_lines(place / name)]
    if not lines:
        raise DropkvError(
            f"{show_path(folder)}: no results in it: run `dropkv bench accuracy`, `theory` or `speed` with -o first"
        )
    from dropkv.bench.report import write_report

    page = Path(output) if output else place / PAGE
    with naming(page):
        write_report(lines, page)
    say(f"{show_path(folder)} -> {show_path(page)} ({len(lines):,} lines, {size(page.stat().st_size)})")
