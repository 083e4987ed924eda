"""`dropkv bench tasks`: what `dropkv bench accuracy` can ask."""

from __future__ import annotations

import re
from typing import Any

import click

from dropkv_cli.options import json_option
from dropkv_cli.output import json_line, result, say, table


@click.command("tasks", short_help="List the tasks, and which need files of their own.")
@json_option
def command(as_json: bool) -> None:
    """List the tasks, their families, and which need files of their own."""
    from dropkv.bench.plan import GROUPS
    from dropkv.bench.tasks import names

    rows = [_row(name) for name in names()]
    if as_json:
        for row in rows:
            json_line(row)
        return
    result(table(("task", "family", "needs"), [(row["task"], row["family"], row["needs"] or "") for row in rows]))
    for group, members in GROUPS.items():
        say(f"{group}: {', '.join(members)}")


def _row(name: str) -> dict[str, Any]:
    """A task without its files: those of LongBench would be fetched from the Hub, which a list must not do."""
    from dropkv.bench.tasks import get
    from dropkv.bench.tasks.longbench import NAMES
    from dropkv.errors import UsageError

    if name in NAMES:
        return {"task": name, "family": "LongBench", "needs": "LongBench's files, from the Hub or with --data"}
    try:
        return {"task": name, "family": get(name).label, "needs": None}
    except UsageError as error:
        package = re.search(r"the package \w+", str(error))
        needs = str(error).partition("needs ")[2].partition(";")[0]
        return {"task": name, "family": "RULER-shaped", "needs": package[0] if package else f"{needs}, with --data"}
