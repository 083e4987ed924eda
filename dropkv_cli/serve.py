"""`dropkv serve`: answer questions on KV files over HTTP, in the shape of OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from dropkv.errors import DropkvError
from dropkv.hub.address import is_address
from dropkv.serve.names import plan_names
from dropkv.settings import check_batch_size
from dropkv_cli.endings import failure
from dropkv_cli.interrupts import import_compiler
from dropkv_cli.options import (
    batch_size_option,
    device_options,
    flag,
    json_option,
    model_of_file_option,
    note_budget,
    smaller_budget_option,
)
from dropkv_cli.output import complain, failure_keys, harmless, json_line, one_line, result, say
from dropkv_cli.progress import waiting
from formats import read_header
from formats.errors import FormatError, show_path

if TYPE_CHECKING:
    import socket

    from dropkv.serve.app import Report
    from dropkv.serve.shelf import Shelf

NEEDED = ("starlette", "uvicorn")


@click.command("serve")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address to listen at.")
@click.option(
    "--port", type=int, default=8000, show_default=True, metavar="PORT", help="Port to listen at; 0 is any free one."
)
@batch_size_option("Answer up to so many requests at once, whichever file they are for; others wait.")
@model_of_file_option(
    "the one the first file names", "Alias, Hub id or local folder of the model the files were made with."
)
@smaller_budget_option(
    "the one each file was made with",
    "Answer with a smaller budget than the files': 0.05 is a share of the tokens, 2048 entries per KV head.",
)
@device_options
@flag(
    "--allow-mismatch", help="Serve files even if weights, tokenizer or template differ from those they were made with."
)
@flag(
    "--log",
    help="Say a line for each request: which file, how many tokens, how long, how it ended; never what was asked.",
)
@json_option
def command(
    files: tuple[str, ...],
    host: str,
    port: int,
    batch_size: int | None,
    model: str | None,
    budget: float | int | None,
    dtype: str,
    device: str,
    revision: str | None,
    allow_mismatch: bool,
    log: bool,
    as_json: bool,
) -> int:
    """Answer questions on .kv files over HTTP, in the shape of OpenAI's chat completions, and on a page for a browser.

    Each file is a model of the API, called by its name without .kv, or as NAME=FILE says; a folder stands for the .kv files in it. All
    files belong to one model, which is loaded once. A file that cannot be opened is named, and the others are served. Requests
    that come while others are being answered join them. Ctrl-C lets running answers come to their end; pressed twice it ends at once.

    With --json one line says the address, the model and the files when requests can come; --port 0 takes any free port.
    """
    check_batch_size(batch_size)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise DropkvError(f"a server needs {' and '.join(missing)}: pip install 'dropkv[serve]'")
    planned = plan_names(files)
    from dropkv.serve.listening import is_local, listen, take_port

    failed: dict[str, str] = {}

    def refused(name: str, error: Exception) -> None:
        failed[name] = str(error)
        complain(str(error))

    good = _readable(planned, refused)
    taken = take_port(host, port)  # before minutes are spent on a model
    waiting(f"loading {one_line(model or 'the model')} ...")
    import_compiler()
    from dropkv.serve.app import Server, make_app
    from dropkv.serve.shelf import open_shelf

    started = time.perf_counter()
    shelf = open_shelf(
        good,
        model=model,
        revision=revision,
        dtype=dtype,
        device=device,
        budget=budget,
        allow_mismatch=allow_mismatch,
        failed=refused,
        note=say,
    )
    for name, kv in shelf.files.items():
        note_budget(budget, kv.metadata.document.tokens, show_path(planned[name]))
    rows = shelf.rows(batch_size)
    server = Server(
        shelf, rows, said=_say if log else lambda report: None, failed=lambda error: complain(failure(error))
    )
    app = make_app(server, [host] if is_local(taken) else None)
    seconds = time.perf_counter() - started

    def ready() -> None:
        _announce(shelf, planned, failed, taken, rows, seconds, as_json)

    def leaving() -> None:
        count = server.engine.running + server.engine.waiting
        if count:
            say(f"finishing {count:,} answer{'s' * (count > 1)}; Ctrl-C again ends at once")

    listen(app, taken, ready=ready, leaving=leaving)
    return 0


def _readable(planned: dict[str, str], refused: Callable[[str, Exception], None]) -> dict[str, str]:
    """The files but for those of which it is known without torch that they are no KV files. Raises what is wrong with a single one, or DropkvError
    where none is left."""
    good = {}
    for name, file in planned.items():
        try:
            if not is_address(file):
                read_header(file)
            good[name] = file
        except FormatError as error:
            if len(planned) == 1:
                raise
            refused(name, error)
    if not good:
        raise DropkvError(f"none of these {len(planned)} files can be served: see above")
    return good


def _announce(
    shelf: Shelf,
    planned: dict[str, str],
    failed: dict[str, str],
    taken: socket.socket,
    rows: int,
    seconds: float,
    as_json: bool,
) -> None:
    """What is served and where, now that requests can come."""
    from dropkv.serve.listening import address_of, is_local

    address = address_of(taken)
    if as_json:
        served = [
            {
                "name": name,
                "file": planned[name],
                "document": kv.metadata.document.name,
                "document_tokens": kv.document_tokens,
            }
            for name, kv in shelf.files.items()
        ]
        wrong = [{"name": name, "file": planned[name], **failure_keys(error)} for name, error in failed.items()]
        json_line({"address": address, "model": shelf.model.id, "batch_size": rows, "files": served, "failed": wrong})
        return
    for name, kv in shelf.files.items():
        document = kv.metadata.document
        say(
            harmless(
                f"{name}: {one_line(document.name)}, {document.tokens:,} tokens, "
                f"{kv.session.entries_per_head:,} entries per KV head ({show_path(planned[name])})"
            )
        )
    count = len(shelf.files)
    say(
        f"{one_line(shelf.model.id)} and {count} file{'s' * (count > 1)} loaded in {seconds:.1f} s, "
        f"up to {rows} request{'s' * (rows > 1)} at once; Ctrl-C ends"
    )
    if not is_local(taken):
        say("note: whoever reaches this port can ask these files, and learn from them what the documents say")
    result(address)


def _say(report: Report) -> None:
    usage = report.usage
    say(
        f"{one_line(report.model)}: {usage.computed:,} tokens read, {usage.answer:,} written in {report.seconds:.2f} s, {report.outcome}"
    )
