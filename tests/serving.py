"""A server of this process, with the real client of OpenAI's API to ask it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from dropkv.library import KVFile
from dropkv.serve.app import Report, Server, make_app
from dropkv.serve.listening import Listener, address_of, take_port
from dropkv.serve.shelf import Shelf

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass
class Served:
    """A running server. reports: of requests that have ended. failures: what nobody expected."""

    address: str
    server: Server
    reports: list[Report] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def client(self, **options: object) -> OpenAI:
        """A client that tries everything once, so that nothing is covered up."""
        openai = pytest.importorskip("openai", reason="pip install 'dropkv[test]'")
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.address}/v1", **settings)  # type: ignore[arg-type]

    @property
    def idle(self) -> bool:
        """Whether no request is known any more."""
        engine = self.server.engine
        return not (engine.running or engine.waiting or self.server._news)


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something, and fail when it does not come."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@contextmanager
def serving(files: Mapping[str, KVFile], rows: int = 8) -> Iterator[Served]:
    """Serve files of one model at a free port for the length of the block."""
    shelf = Shelf(next(iter(files.values())).model, files, 0)
    reports: list[Report] = []
    failures: list[Exception] = []
    server = Server(shelf, rows, said=reports.append, failed=failures.append)
    taken = take_port("127.0.0.1", 0)
    up = threading.Event()
    listener = Listener(make_app(server), ready=up.set, leaving=lambda: None)
    thread = threading.Thread(target=listener.run, args=([taken],))
    thread.start()
    assert up.wait(20)
    try:
        yield Served(address_of(taken), server, reports, failures)
    finally:
        listener.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
