"""`dropkv verify`: is every byte of a KV file as it was written, and does it belong to this model?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dropkv.hub.client import Hub
from dropkv.hub.fetch import whole
from dropkv_cli.interrupts import import_compiler, import_torch
from dropkv_cli.options import device_options, json_option, model_aliases, refuse_pipe
from dropkv_cli.output import json_line, result, say, size
from dropkv_cli.progress import waiting
from dropkv_cli.shells import offer
from formats import read_header, verify_file
from formats.errors import show_path

if TYPE_CHECKING:
    from formats import Metadata


@click.command("verify")
@click.argument("file", metavar="FILE")
@click.option(
    "--model",
    default=None,
    show_default="the file alone is checked",
    metavar="MODEL",
    shell_complete=offer(names=model_aliases, files=True),
    help="Load this model and compare its weights, tokenizer and template with those of the file.",
)
@device_options
@json_option
def command(file: str, model: str | None, dtype: str, device: str, revision: str | None, as_json: bool) -> None:
    """Check the structure and all checksums of a .kv file; with --model also that it was made with that model.

    Prints one line that starts with "ok", or says which byte range is damaged and exits with 1.
    """
    refuse_pipe(file)
    place = whole(file, Hub(note=say))
    read_header(place)  # what is no KV file is refused before torch is imported
    import_torch()
    report = verify_file(place)
    if model is not None:
        _check_identity(file, report.header.metadata, model, dtype, device, revision)
    if as_json:
        json_line(
            {
                "file": file,
                "ok": True,
                "tensors": report.tensors,
                "blocks": report.blocks,
                "data_bytes": report.data_bytes,
                "model": model,
            }
        )
        return
    identity = "no model compared" if model is None else f"weights, tokenizer and template are those of {model}"
    result(
        f"ok: {show_path(file)}: header, structure, {report.tensors} tensors in {report.blocks} blocks "
        f"({size(report.data_bytes)}); {identity}"
    )


def _check_identity(file: str, metadata: Metadata, name: str, dtype: str, device: str, revision: str | None) -> None:
    """Raises IdentityError with the values side by side."""
    waiting(f"loading {name} ...")
    import_compiler()
    from dropkv.identity import check
    from dropkv.models import load_model
    from dropkv.prompts import Seam

    model = load_model(name, revision=revision, dtype=dtype, device=device, note=say)
    tokenizer = metadata.tokenizer
    seam = Seam.of(model.tokenizer, system=tokenizer.system, arguments=tokenizer.template_arguments, name=model.id)
    check(metadata, model, seam, path=file)
