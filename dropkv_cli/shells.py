"""What the Tab key offers behind a command or an option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

FILES = re.compile(r"\b(FILE|FOLDER|DOC|PLAN)\b")

Offer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class Name(click.types.StringParamType):
    """Text for which a shell offers names of files, and which is taken as it is."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Leaves it to the shell to look for files."""
        return [CompletionItem(incomplete, type="file")]


def complete_files(command: click.Command) -> None:
    """Let the shell offer files wherever a command's help speaks of a FILE, FOLDER or DOC."""
    for parameter in _parameters(command):
        if parameter.type is click.STRING and FILES.search(parameter.metavar or ""):
            parameter.type = Name()


def offer(*words: str, names: Callable[[], Iterable[str]] | None = None, files: bool = False) -> Offer:
    """For `shell_complete=`: these words, those that `names` gives when it comes to it, and files where no word fits."""

    def offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        known = [*words, *(names() if names else ())]
        items = [CompletionItem(word) for word in known if word.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if files else [])

    return offered


def offer_list(names: Callable[[], Iterable[str]]) -> Offer:
    """For `shell_complete=` of an option that takes A,B,..: names for its last part, but those that stand before it."""

    def offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        used = before.split(",")
        return [CompletionItem(before + comma + name) for name in names() if name.startswith(last) and name not in used]

    return offered


def _parameters(command: click.Command) -> Iterator[Any]:
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _parameters(command.commands[name])
    yield from command.params
