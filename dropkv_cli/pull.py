"""`dropkv pull`: fetch a KV file from the Hugging Face Hub and check it."""

from __future__ import annotations

import click

from dropkv.errors import UsageError
from dropkv_cli.interrupts import import_torch
from dropkv_cli.options import flag, json_option, refuse_empty
from dropkv_cli.output import json_line, result, say, size
from formats.errors import show_path


@click.command("pull")
@click.argument("address", metavar="hf://NAMESPACE/NAME[@REVISION]/FILE")
@click.option(
    "-o",
    "--output",
    metavar="FILE|FOLDER/",
    default=None,
    show_default="the Hub's cache alone",
    help="Copy it to this file, or under its own name into this folder.",
)
@flag("--force", help="Replace an output file that exists.")
@json_option
def command(address: str, output: str | None, force: bool, as_json: bool) -> None:
    """Fetch a .kv file from the Hugging Face Hub, check every byte of it, and print where it is.

    It is kept in the Hub's usual cache; `dropkv query hf://...` uses that without a pull. A damaged copy in the cache is fetched anew.
    """
    from dropkv.hub.address import FORM, is_address
    from dropkv.hub.client import Hub
    from dropkv.hub.pull import pull

    refuse_empty(address, "the address", f"write {FORM}")
    refuse_empty(output, "-o", "name a file or a folder, or leave it out")
    if output is not None and "://" in output:
        raise UsageError(f"-o {show_path(output)} is an address: name a file or a folder of this machine")
    if is_address(address):  # what is none is refused at once
        import_torch()
    pulled = pull(address, output, overwrite=force, hub=Hub(note=say))
    if as_json:
        json_line(
            {
                "address": str(pulled.address),
                "commit": pulled.commit,
                "file": str(pulled.path),
                "file_bytes": pulled.header.file_bytes,
                "downloaded": pulled.fresh,
            }
        )
        return
    result(str(pulled.path))
    where = "downloaded" if pulled.fresh else "found in the cache"
    say(f"{size(pulled.header.file_bytes)} {where} and checked, commit {pulled.commit}")
