"""`dropkv models`: the aliases, what they stand for, and which work without a network."""

from __future__ import annotations

from dataclasses import asdict

import click

from dropkv.models import catalogue
from dropkv_cli.options import json_option
from dropkv_cli.output import json_line, result, say, table


@click.command("models")
@json_option
def command(as_json: bool) -> None:
    """List the model aliases and whether each is usable offline now."""
    rows = catalogue()
    if as_json:
        for row in rows:
            json_line(asdict(row))
        return
    cells = [(row.alias, row.stands_for, "yes" if row.usable_offline else "no", row.note) for row in rows]
    result(table(("alias", "stands for", "offline now", "note"), cells))
    say("Any other decoder-only model works too: --model with a Hub id or a local folder.")
