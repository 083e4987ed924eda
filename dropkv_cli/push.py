"""`dropkv push`: upload a KV file to the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from dropkv.errors import UsageError
from dropkv_cli.interrupts import import_torch
from dropkv_cli.options import flag, json_option, refuse_empty, refuse_pipe
from dropkv_cli.output import complain, json_line, result, say, size
from formats import read_header
from formats.errors import printable, show_path

if TYPE_CHECKING:
    from dropkv.hub.push import Pushed, Upload

WARNING = (
    "warning: a KV file holds its document's content; {reader} can recover much of it, with or without token ids. "
    "Share it as you would share the document."
)
LICENCES = "such as cc-by-4.0, cc0-1.0, apache-2.0, other or unknown"


@click.command("push")
@click.argument("file", metavar="FILE")
@click.argument("repository", metavar="NAMESPACE/NAME")
@click.option(
    "--license",
    "licence",
    metavar="ID",
    default=None,
    show_default="the one of the repository's card; else it is asked for",
    help=f"Licence of the document, {LICENCES}; it stands in the card.",
)
@click.option(
    "--name", metavar="NAME", default=None, show_default="that of FILE", help="The file's name in the repository."
)
@flag(
    "--public", help="Let everybody read the repository; without it a new one is private, and a public one is refused."
)
@flag("--no-tokens", help="Upload a copy without the document's token ids; FILE stays as it is.")
@json_option
def command(
    file: str, repository: str, licence: str | None, name: str | None, public: bool, no_tokens: bool, as_json: bool
) -> None:
    """Upload a checked .kv file to a model repository of the Hugging Face Hub, with a card that describes it.

    The repository is made if it is not there, and is private unless --public is given. File and card are one commit; a file of
    that name is replaced, its former state stays under its own commit. Log in first with `hf auth login`.
    """
    from dropkv.hub.address import refuse_web_address
    from dropkv.hub.client import Hub
    from dropkv.hub.push import prepare, push, target_of

    refuse_pipe(file)
    refuse_empty(repository, "the repository", "write NAMESPACE/NAME")
    refuse_web_address(repository)
    address = target_of(repository, file, name)
    if licence is not None:
        licence = _check_licence(licence)
    read_header(file)  # what is no KV file is refused before torch is imported
    import_torch()
    hub = Hub(note=say)
    upload = prepare(file, address, public=public, hub=hub)
    say(
        WARNING.format(
            reader="everybody"
            if (public and not upload.exists) or not upload.private
            else "whoever may read the repository"
        )
    )
    if public and upload.exists and upload.private:
        say(f"note: {address.folder} exists and is private; it stays so, its settings on the Hub change that")
    if no_tokens and "tokens" not in upload.header.tensors:
        say(f"note: {show_path(file)} holds no token ids, it is uploaded as it is")
    chosen = licence or (None if upload.licence else _ask_licence())
    pushed = push(upload, chosen, tokens=not no_tokens, hub=hub)
    if as_json:
        json_line(_record(file, pushed))
        return
    result(str(pushed.address))
    say(_told(upload, pushed))


def _check_licence(text: str) -> str:
    """The identifier of a licence as written. Raises UsageError for what the Hub would not take for one."""
    licence = text.strip()
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,63}", licence):
        raise UsageError(f"{printable(licence, 80)!r} is no identifier of a licence: use one {LICENCES}")
    return licence


def _ask_licence() -> str:
    """Ask on a terminal; elsewhere raise UsageError. A card without one leaves readers without any right, and nobody notices."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"no licence: name that of the document with --license ID, {LICENCES}")
    while True:
        say(f"Licence of the document, {LICENCES}:")
        line = sys.stdin.readline()
        if not line:
            raise click.Abort
        try:
            return _check_licence(line)
        except UsageError as error:
            complain(str(error))


def _told(upload: Upload, pushed: Pushed) -> str:
    kind = "private" if pushed.private else "public"
    if not pushed.changed:
        return f"the {kind} repository holds this file already: {pushed.commit_url}"
    verb = "replaced in" if upload.replaces else "uploaded to"
    new = "the new " if pushed.created else "the "
    tokens = "with token ids" if pushed.tokens_stored else "without token ids"
    return f"{size(pushed.file_bytes)}, {tokens}, {verb} {new}{kind} repository: {pushed.commit_url}"


def _record(file: str, pushed: Pushed) -> dict[str, object]:
    return {
        "file": file,
        "address": str(pushed.address),
        "commit": pushed.commit,
        "commit_url": pushed.commit_url,
        "private": pushed.private,
        "created": pushed.created,
        "changed": pushed.changed,
        "file_bytes": pushed.file_bytes,
        "tokens_stored": pushed.tokens_stored,
    }
