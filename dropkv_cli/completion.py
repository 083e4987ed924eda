"""`dropkv completion`: the script by which a shell completes commands, options and names at the Tab key."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dropkv_cli.output import result

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS), metavar="|".join(SHELLS))
def command(shell: str) -> None:
    """Print the script that completes commands, options and names at the Tab key.

    \b
    bash, in ~/.bashrc:   eval "$(dropkv completion bash)"
    zsh, in ~/.zshrc:     eval "$(dropkv completion zsh)"
    fish:                 dropkv completion fish > ~/.config/fish/completions/dropkv.fish
    """
    from dropkv_cli.app import COMPLETING, PROGRAM, cli

    kind = get_completion_class(shell)
    assert kind is not None
    result(kind(cli, {}, PROGRAM, COMPLETING).source())
