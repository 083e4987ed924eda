"""`dropkv bench`: compare methods on tasks, measure what the theory says, and make a report of it. One module per subcommand."""

from __future__ import annotations

import click

from dropkv_cli.bench import accuracy, report, speed, tasks, theory


@click.group("bench")
def command() -> None:
    """Compare methods on one machine: how often answers stay right, what it takes, and what the theory's constants are."""


for module in (accuracy, tasks, theory, speed, report):
    command.add_command(module.command)
