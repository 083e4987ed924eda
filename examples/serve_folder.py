"""Answer questions on every .kv file of a folder over HTTP, with one load of the model and the standard library alone.

    python examples/serve_folder.py kv/ --port 8000
    curl localhost:8000/
    curl localhost:8000/ask -d '{"file": "book.kv", "question": "Who is the killer?"}'

GET / lists the files. POST /ask takes "file", "question" and, if wanted, "max_new_tokens"; it gives "answer", "stopped" and what was
computed. One question is answered at a time. A file is opened at its first question, and again when it has changed. This is an
example: it speaks to this computer alone, and knows no users.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import dropkv
from dropkv.library import load_for
from formats import read_header

LONGEST_BODY = 64 << 10
OPEN_FILES = 4  # each holds its entries in memory


class Shelf:
    """The .kv files of a folder, opened when they are asked for, and the one model that answers."""

    def __init__(self, folder: Path, model: str | None) -> None:
        self.folder = folder
        names = self.names()
        if not names:
            raise dropkv.DropkvError(f"{folder}: no .kv file lies in it: make one with `dropkv compress`")
        self.model = load_for(read_header(folder / names[0]), model)
        self._open: dict[tuple[str, int], dropkv.KVFile] = {}

    def names(self) -> list[str]:
        """The files that can be asked now."""
        return sorted(path.name for path in self.folder.glob("*.kv") if path.is_file())

    def ask(self, name: str, question: str, max_new_tokens: int) -> dropkv.Answer:
        """Raises KeyError for a file that is not there, and what opening and asking raise."""
        if name not in self.names():  # a name of the list is no path to anywhere else
            raise KeyError(name)
        path = self.folder / name
        key = (name, path.stat().st_mtime_ns)
        if key not in self._open:
            opened = dropkv.load(path, model=self.model)
            others = [(kept, file) for kept, file in self._open.items() if kept[0] != name]
            self._open = dict([*others, (key, opened)][-OPEN_FILES:])
        return self._open[key].ask(question, dropkv.Sampling(max_new_tokens=max_new_tokens))


def make_server(shelf: Shelf, port: int) -> HTTPServer:
    """A server on this computer; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                self._send(200, {"model": shelf.model.id, "files": shelf.names()})
            else:
                self._send(404, {"error": "GET / lists the files, POST /ask answers"})

        def do_POST(self) -> None:
            if self.path != "/ask":
                self._send(404, {"error": "POST /ask answers"})
                return
            try:
                wanted = self._wanted()
                self._send(200, _record(shelf.ask(**wanted)))
            except KeyError as error:
                self._send(404, {"error": f"{error.args[0]}: no such file, GET / lists them"})
            except (ValueError, dropkv.DropkvError, dropkv.FormatError) as error:
                self._send(400, {"error": str(error)})

        def _wanted(self) -> dict[str, Any]:
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 < length <= LONGEST_BODY:
                raise ValueError(f"send 1 to {LONGEST_BODY} bytes of JSON")
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict) or not all(isinstance(body.get(key), str) for key in ("file", "question")):
                raise ValueError('send a JSON object with the texts "file" and "question"')
            limit = body.get("max_new_tokens", 256)
            if type(limit) is not int:
                raise ValueError('"max_new_tokens" is a whole number')
            return {"name": body["file"], "question": body["question"], "max_new_tokens": limit}

        def _send(self, status: int, record: dict[str, Any]) -> None:
            body = json.dumps(record).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return HTTPServer(("127.0.0.1", port), Handler)


def _record(answer: dropkv.Answer) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "stopped": answer.stopped,
        "prefilled_tokens": answer.prefilled_tokens,
        "generated_tokens": answer.generated_tokens,
        "seconds": answer.seconds_total,
    }


def main() -> None:
    """Load the model of the folder's first file and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Answer questions on every .kv file of a folder over HTTP.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="the model the files were made with (default: the one the first file names)")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        server = make_server(Shelf(given.folder, given.model), given.port)
    except (dropkv.DropkvError, dropkv.FormatError) as error:
        raise SystemExit(f"serve_folder: {error}") from None
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
