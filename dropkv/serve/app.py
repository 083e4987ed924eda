"""The HTTP side: routes, replies and streams; answers come from the engine's thread.

Starlette, not FastAPI: bodies are checked here, so that every refusal is an error of OpenAI's shape which says what to do, and pydantic's own
reports would have to be turned off everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files as resources
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dropkv import __version__
from dropkv.serve.conversation import asked_of
from dropkv.serve.engine import Busy, Engine, Ticket
from dropkv.serve.refusals import FAILED, Refused
from dropkv.serve.replies import LAST_EVENT, Reply, Usage, encoded, event, model_record
from dropkv.serve.requests import ChatRequest, parse_request
from dropkv.serve.shelf import Shelf
from dropkv.serve.text import AnswerWriter
from formats.errors import printable

LONGEST_BODY = 4 << 20
PLACES = "/v1/models, /v1/chat/completions and /health"
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


@dataclass(frozen=True)
class Report:
    """A request that has ended. outcome: stop, length, gone (the client went away), or failed."""

    model: str
    usage: Usage
    seconds: float
    outcome: str


class Server:
    """What is served: the files of a shelf by so many rows. said: called for each request that has ended. failed: for what nobody expected."""

    def __init__(
        self,
        shelf: Shelf,
        rows: int,
        *,
        said: Callable[[Report], None] = lambda report: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.shelf = shelf
        self.engine = Engine(shelf.model, rows, shelf.capacity, self._tell)
        self.said = said
        self.failed = failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: dict[Ticket, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """The engine answers as long as this is open."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.close)

    def _tell(self, tickets: Sequence[Ticket]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            self._loop.call_soon_threadsafe(self._wake, tickets)

    def _wake(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket in self._news:
                self._news[ticket].set()

    # What is asked for

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        data = [model_record(name, kv, self.shelf.opened) for name, kv in self.shelf.files.items()]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        name = request.path_params["name"]
        self._known(name)
        return _json(model_record(name, self.shelf.files[name], self.shelf.opened))

    async def health(self, request: Request) -> Response:
        """GET /health"""
        engine = self.engine
        counts = {"rows": engine.rows, "answering": engine.running, "waiting": engine.waiting}
        about = {"version": __version__, "model": self.shelf.model.id, "files": list(self.shelf.files)}
        return _json({"status": "ok", **counts, **about})

    async def page(self, request: Request) -> Response:
        """GET /"""
        text = resources("dropkv.serve").joinpath("page.html").read_text(encoding="utf-8")
        return Response(text, media_type="text/html", headers={"content-security-policy": PAGE_POLICY})

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        wanted = parse_request(await _body(request))
        self._known(wanted.model)
        answering = Answering(self, wanted)
        if wanted.stream:
            return EventStream(answering)
        async with _while_connected(request.receive, answering):
            return await answering.whole()

    def _known(self, name: str) -> None:
        if name not in self.shelf.files:
            names = printable(", ".join(self.shelf.files), 400)
            raise Refused(
                f"there is no model {printable(name, 80)!r}: use one of {names}",
                status=404,
                param="model",
                code="model_not_found",
            )


class Answering:
    """One request from its ticket to its end. Raises Refused when it is made for what cannot be asked."""

    def __init__(self, server: Server, wanted: ChatRequest) -> None:
        session = server.shelf.files[wanted.model].session
        self.server = server
        self.wanted = wanted
        self.reply = Reply(wanted.model)
        self.started = time.perf_counter()
        self.finish: str | None = None  # stop, length or gone
        asked = asked_of(session, wanted)
        self._document, self._computed = session.prefix.n, len(asked.ids)
        self._writer = AnswerWriter(session.text, wanted.stops)
        try:
            self.ticket = server.engine.submit(asked)
        except Busy:
            raise Refused(
                "too many requests are waiting: ask again later", status=429, code="busy", kind="rate_limit_error"
            ) from None
        self._news = server._news[self.ticket] = asyncio.Event()

    @property
    def usage(self) -> Usage:
        """What it took so far."""
        return Usage(self._document, self._computed, self._writer.tokens)

    async def pieces(self) -> AsyncIterator[str]:
        """The answer's text as it grows. Raises Refused when the engine fails; then, or when it is left early, the row is given back."""
        try:
            while self.finish is None:
                await self._news.wait()
                self._news.clear()
                done = self.ticket.done  # before the tokens are looked at, which none follows then
                if self.ticket.error is not None:
                    raise self._broken(self.ticket.error)
                piece = self._writer.more(list(self.ticket.tokens), done=done)
                if self._writer.stopped or (done and self.ticket.stopped):
                    self.finish = "stop"
                elif done:
                    self.finish = "length"
                if piece:
                    yield piece
        finally:
            self.end()

    async def whole(self) -> Response:
        """The answer in one reply."""
        text = "".join([piece async for piece in self.pieces()])
        return _json(self.reply.whole(text, self.finish or "", self.usage))

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as events of a stream."""
        yield event(self.reply.part({"role": "assistant", "content": ""}))
        try:
            async for piece in self.pieces():
                yield event(self.reply.part({"content": piece}))
        except Refused as error:
            yield event(error.body)
            return
        yield event(self.reply.part({}, self.finish))
        if self.wanted.include_usage:
            yield event(self.reply.costs(self.usage))
        yield LAST_EVENT

    def gone(self) -> bool:
        """The client went away; whether that was before the end of the answer."""
        early = self.finish is None
        self.finish = self.finish or "gone"
        return early

    def end(self) -> None:
        """Give the row back, if it has not come to its end by itself."""
        if self.server._news.pop(self.ticket, None) is None:
            return
        self.server.engine.give_up(self.ticket)
        seconds = time.perf_counter() - self.started
        self.server.said(Report(self.wanted.model, self.usage, seconds, self.finish or "failed"))

    def _broken(self, error: Exception) -> Refused:
        self.server.failed(error)
        return Refused(
            f"the answer could not be computed ({type(error).__name__}): the server's own output says more",
            status=500,
            code="failed",
            kind=FAILED,
        )


class EventStream(Response):
    """An answer as a stream of events, which ends when the client goes away."""

    def __init__(self, answering: Answering) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Gone):
            await self._send(receive, send)

    async def _send(self, receive: Receive, send: Send) -> None:
        async with _while_connected(receive, self.answering):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self.answering.events():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gate:
    """Refuses what pages of other sites send through a visitor's browser: they must not read or ask files that this machine serves.

    names: hosts that a request may be for, beside addresses in numbers and localhost; None for any.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str] | None) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        refused = None
        if self.names is not None and not _is_own(host, self.names):
            refused = f"this server is not {printable(host, 80)!r}: use its address in numbers, or localhost"
        elif origin is not None and urlsplit(origin).netloc != host:
            refused = f"pages of {printable(origin, 80)} may not use this server: open its own page, or ask it without a browser"
        if refused is None:
            await self.app(scope, receive, send)
        else:
            await _refusal(Refused(refused, status=403, code="forbidden"))(scope, receive, send)


def make_app(server: Server, names: Sequence[str] | None = ()) -> ASGIApp:
    """The application. names: hosts that requests may be for, as for `Gate`."""
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return _refusal(error)

    async def elsewhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = "is not used so" if error.status_code == 405 else "is not here"
        message = f"{request.method} {printable(request.url.path, 80)} {what}: there are {PLACES}"
        return _refusal(Refused(message, status=error.status_code, code="not_found"), error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        server.failed(error)
        message = f"something unexpected happened ({type(error).__name__}): the server's own output says more"
        return _refusal(Refused(message, status=500, kind=FAILED, code="failed"))

    # Exception itself is not among the handlers: Starlette would raise it once more behind its reply.
    handlers = {Refused: refused, HTTPException: elsewhere}
    inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=server.running)
    return Gate(_Unexpected(inner, unexpected), names)


class _Unexpected:
    """Replies to what nobody expected, as far as nothing has been sent."""

    def __init__(self, app: ASGIApp, reply: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self.app = app
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: dict[str, object]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, sending)  # type: ignore[arg-type]
        except Exception as error:
            if scope["type"] != "http":
                raise
            response = await self.reply(Request(scope), error)
            if not begun:
                await response(scope, receive, send)


@contextlib.asynccontextmanager
async def _while_connected(receive: Receive, answering: Answering) -> AsyncIterator[None]:
    """Stops what is done inside when the client goes away, and gives the row back in any case."""
    inside = asyncio.current_task()
    assert inside is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if answering.gone():
            inside.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if answering.finish != "gone":
            raise
        inside.uncancel()
        raise Gone from None
    finally:
        watching.cancel()
        answering.end()


class Gone(Refused):
    """The client went away; what is replied, nobody reads."""

    def __init__(self) -> None:
        super().__init__("the client went away", status=499, code="gone")


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_BODY:
                raise Refused(f"the body is longer than {LONGEST_BODY:,} bytes", status=413, code="body_too_long")
    except ClientDisconnect:
        raise Gone from None
    return bytes(body)


def _is_own(host: str, names: Sequence[str]) -> bool:
    name = (urlsplit(f"//{host}").hostname or "") if host else ""
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _json(record: dict[str, object], status: int = 200) -> Response:
    return Response(encoded(record), status, media_type="application/json")


def _refusal(error: Refused, headers: object = None) -> Response:
    response = _json(error.body, error.status)
    for name, value in dict(headers or {}).items():  # type: ignore[call-overload]
        response.headers[name] = value
    return response
