"""The port, and the server that listens at it until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp

from dropkv.errors import DropkvError, UsageError
from formats.errors import printable

GRACE = 30  # seconds that running answers have to come to their end after Ctrl-C


def take_port(host: str, port: int) -> socket.socket:
    """A socket bound to a port of this machine, not listening yet, so that clients are refused until `listen`; port 0 is any free one.

    Raises UsageError for a host or port that cannot be meant, DropkvError for a port that is taken, also by a server that does not listen
    yet, or not allowed.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} is out of range: use --port from 1 to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name"
        raise UsageError(f"host {printable(host, 80)} is not known ({reason}): use --host 127.0.0.1") from None
    taken = socket.socket(family, kind, protocol)
    try:
        try:
            taken.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Connections of a server that has ended are no obstacle. Without this they are, but so is a server that has yet to listen.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        taken.close()
        raise _refused(error, host, port) from None
    return taken


def open_port(taken: socket.socket) -> None:
    """Let clients connect. Raises DropkvError when another server has begun to listen at the port meanwhile."""
    host, port = taken.getsockname()[:2]
    try:
        taken.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # connections have it too, so that the next server can begin
        taken.listen()
    except OSError as error:
        taken.close()
        raise _refused(error, host, port) from None


def _refused(error: OSError, host: str, port: int) -> DropkvError:
    where = f"port {port} of {printable(host, 80)}"
    advice = "use another --port, 0 for any free one"
    if error.errno == errno.EADDRNOTAVAIL:
        advice = "this machine has no such address: use --host 127.0.0.1, or 0.0.0.0 for all it has"
    return DropkvError(f"{where} cannot be taken ({error.strerror}): {advice}")


def address_of(taken: socket.socket) -> str:
    """The web address of a bound socket."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(taken: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ip_address(taken.getsockname()[0].split("%")[0]).is_loopback


class Listener(uvicorn.Server):
    """Serves an application at a bound socket.

    ready: called when requests can come. leaving: called once when Ctrl-C has been pressed, while answers come to their end.
    """

    def __init__(self, app: ASGIApp, *, ready: Callable[[], None], leaving: Callable[[], None]) -> None:
        # Its own log would be a second voice: what there is to say is said by those who know.
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=GRACE,
            )
        )
        self._ready = ready
        self._leaving = leaving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but what was ignored before, as a shell's background job ignores Ctrl-C, stays ignored."""
        ignored = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_IGN]
        with super().capture_signals():
            if threading.current_thread() is threading.main_thread():
                for number in ignored:
                    signal.signal(number, signal.SIG_IGN)
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._leaving()
        await super().shutdown(sockets)


def listen(app: ASGIApp, taken: socket.socket, *, ready: Callable[[], None], leaving: Callable[[], None]) -> None:
    """Serve until Ctrl-C, which then raises KeyboardInterrupt; pressed twice it ends at once.

    Raises DropkvError when another server has begun to listen at the port.
    """
    with contextlib.closing(taken):
        open_port(taken)
        Listener(app, ready=ready, leaving=leaving).run([taken])
