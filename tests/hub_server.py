"""A Hub on the loopback: the endpoints that huggingface_hub calls, with repositories in memory and faults on demand.

Large files lie on a second server with signed addresses, as the real Hub's do. Every request is logged.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "a" * 34
PIECE = 16384


@dataclass
class Repository:
    """Commits in order, each a dictionary of files; the last is the branch main. tags: names of commits."""

    private: bool = False
    gated: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit with these files beside the ones of the commit before."""
        merged = {**(self.commits[-1][1] if self.commits else {}), **files}
        seed = repr((len(self.commits), sorted((name, hashlib.sha256(data).digest()) for name, data in merged.items())))
        self.commits.append((hashlib.sha1(seed.encode()).hexdigest(), merged))
        return self.commits[-1][0]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        wanted = self.commits[-1][0] if revision == "main" else self.tags.get(revision, revision)
        return next((commit for commit in self.commits if commit[0] == wanted), None)


@dataclass
class Fault:
    """What the next `times` requests get whose method and path match: a status, or the true answer spoilt.

    cut: only so many bytes of the body are sent before the connection is closed.
    """

    method: str
    path: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    whole: bool = False
    content: Callable[[bytes], bytes] | None = None


@dataclass(frozen=True)
class Logged:
    """One request, and the bytes of content that went out."""

    server: str
    method: str
    path: str
    headers: dict[str, str]
    status: int
    sent: int


class HubServer:
    """Both servers; `url` is what HF_ENDPOINT has to be."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.log: list[Logged] = []
        self.epoch = 0  # signed addresses of an earlier one are refused
        self.lock = threading.Lock()
        self.hub, self.storage = (
            ThreadingHTTPServer(("127.0.0.1", 0), self._handler(name)) for name in ("hub", "storage")
        )
        for server in (self.hub, self.storage):
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.hub.server_address[1]}"

    @property
    def storage_url(self) -> str:
        return f"http://127.0.0.1:{self.storage.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> Repository:
        repository = self.repositories.setdefault(name, Repository(**options))
        repository.commit(files)
        return repository

    def fail(self, method: str, path: str, **options: Any) -> None:
        self.faults.append(Fault(method, path, **options))

    def requests(self, method: str = "", path: str = "", server: str = "") -> list[Logged]:
        return [
            entry
            for entry in self.log
            if method in ("", entry.method) and re.search(path, entry.path) and server in ("", entry.server)
        ]

    def close(self) -> None:
        for server in (self.hub, self.storage):
            server.shutdown()
            server.server_close()

    def _handler(self, server: str) -> type[BaseHTTPRequestHandler]:
        state = self

        class Handler(Exchange):
            hub = state
            name = server

        return Handler


class Exchange(BaseHTTPRequestHandler):
    """One request to one of the servers."""

    protocol_version = "HTTP/1.1"
    hub: HubServer
    name: str

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""

    def _any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self._chunks())
        self.fault = self._next_fault()
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        if self.fault and self.fault.status:
            body = b'{"error": "as the test wants it"}'
            self._send(self.fault.status, body, {"Content-Type": "application/json", **self.fault.headers})
        elif self.name == "storage":
            self._storage(parts.path)
        else:
            self._hub(parts.path)

    do_GET = do_HEAD = do_POST = do_PUT = _any

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _next_fault(self) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times and fault.method == self.command and re.search(fault.path, self.path):
                    fault.times -= 1
                    return fault
        return None

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        cut = self.fault.cut if self.fault and self.fault.cut is not None else len(body)
        sent = 0 if self.command == "HEAD" else min(cut, len(body))
        with self.hub.lock:
            known = {name.lower(): value for name, value in self.headers.items()}
            self.hub.log.append(Logged(self.name, self.command, self.path, known, status, sent))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        if cut < len(body):
            self.close_connection = True
        self.end_headers()
        for start in range(0, sent, PIECE):
            self.wfile.write(body[start : min(start + PIECE, sent)])

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str = "", message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message or code} if code or message else {}
        self._send(status, b"", headers)

    # The storage server: content by its hash, ranges, uploads.

    def _storage(self, path: str) -> None:
        key = path.rpartition("/")[2]
        if self.command == "PUT":
            if hashlib.sha256(self.body).hexdigest() != key:
                return self._refuse(400, message="hash differs")
            self.hub.objects[key] = self.body
            return self._send(200, b"", {"ETag": f'"{key}"'})
        if self.query.get("epoch") != [str(self.hub.epoch)]:
            return self._refuse(403, message="the signature is too old")
        self._content(self.hub.objects[key], f'"{key[:32]}"')

    def _content(self, data: bytes, etag: str, extra: dict[str, str] | None = None) -> None:
        headers = {"ETag": etag, "Accept-Ranges": "bytes", **(extra or {})}
        if self.fault:
            headers |= self.fault.headers
            data = self.fault.content(data) if self.fault.content else data
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked or (self.fault and self.fault.whole):
            return self._send(200, data, headers)
        start, stop = int(asked[1]), min(int(asked[2] or len(data) - 1) + 1, len(data))
        if start >= len(data):
            return self._refuse(416)
        self._send(206, data[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    # The Hub itself.

    def _hub(self, path: str) -> None:
        token = self.headers.get("Authorization")
        if token is not None and token != f"Bearer {TOKEN}":
            return self._refuse(401, message="Invalid credentials in Authorization header")
        self.known = token is not None
        if path == "/api/repos/create":
            return self._create(json.loads(self.body))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        routes = {
            r"/api/models/([^/]+/[^/]+)": self._info,
            r"/api/models/([^/]+/[^/]+)/revision/(.+)": self._info,
            r"/api/models/([^/]+/[^/]+)/preupload/(.+)": self._preupload,
            r"/api/models/([^/]+/[^/]+)/commit/(.+)": self._commit,
            r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch": self._batch,
            r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self._resolve,
        }
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, path):
                name, *rest = (unquote(group) for group in found.groups())
                repository = self.hub.repositories.get(name)
                if repository is None or (repository.private and not self.known):
                    return self._refuse(404 if self.known else 401, "RepoNotFound", "Repository not found")
                return route(repository, name, *rest)
        self._refuse(404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not self.known:
            return self._refuse(401)
        if name in self.hub.repositories:
            return self._refuse(409, message="exists")
        private = asked.get("private", False) or asked.get("visibility") == "private"
        self.hub.add(name, {".gitattributes": b"*.kv filter=lfs\n"}, private=private)
        self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})

    def _info(self, repository: Repository, name: str, revision: str = "main") -> None:
        found = repository.at(revision)
        if found is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        commit, files = found
        siblings = [{"rfilename": file} for file in files]
        self._json(
            {
                "id": name,
                "sha": commit,
                "private": repository.private,
                "gated": repository.gated,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
        )

    def _preupload(self, repository: Repository, name: str, revision: str) -> None:
        if repository.at(revision) is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        files = [
            {
                "path": file["path"],
                "uploadMode": "regular" if file["path"].endswith(".md") else "lfs",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": files})

    def _batch(self, repository: Repository, name: str) -> None:
        objects = []
        for item in json.loads(self.body)["objects"]:
            href = f"{self.hub.storage_url}/upload/{item['oid']}"
            actions = {} if item["oid"] in self.hub.objects else {"actions": {"upload": {"href": href, "header": {}}}}
            objects.append({"oid": item["oid"], "size": item["size"], **actions})
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        parent = lines[0]["value"].get("parentCommit")
        if parent and parent != repository.commits[-1][0]:
            return self._refuse(412, message="the branch has moved")
        files: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.objects[value["oid"]]
        commit = repository.commit(files)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    def _resolve(self, repository: Repository, name: str, revision: str, file: str) -> None:
        if repository.gated and not self.known:
            return self._refuse(401, "GatedRepo", "Access to this repository is restricted")
        if repository.gated:
            return self._refuse(403, "GatedRepo", "Access to this repository is restricted")
        found = repository.at(revision)
        if found is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        commit, files = found
        if file not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        data, about = files[file], {"X-Repo-Commit": commit}
        if not file.endswith((".kv", ".bin")):
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            return self._content(data, f'"{digest}"', about)
        digest = hashlib.sha256(data).hexdigest()
        self.hub.objects[digest] = data
        location = f"{self.hub.storage_url}/{digest}?epoch={self.hub.epoch}&signature=secret"
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"', "Location": location}
        self._send(302, b"", {**about, **linked})


@contextmanager
def serving() -> Iterator[HubServer]:
    """A Hub for the length of a block."""
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something has happened in another thread or process; fails when it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
