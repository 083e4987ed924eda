"""The port of a server: taken from the start, opened when answers can be given, free for the next server at its end."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("uvicorn", reason="pip install 'dropkv[test]'")

from dropkv.errors import DropkvError
from dropkv.serve.listening import listen, open_port, take_port

HOST = "127.0.0.1"


def port_of(taken: socket.socket) -> int:
    return int(taken.getsockname()[1])


def refusal(port: int) -> str:
    return f"port {port} of {HOST} cannot be taken (Address already in use): use another --port, 0 for any free one"


def test_a_port_of_a_server_that_still_loads_is_refused_at_once() -> None:
    with take_port(HOST, 0) as taken:
        port = port_of(taken)
        with pytest.raises(DropkvError) as refused:
            take_port(HOST, port)
        assert str(refused.value) == refusal(port)
        with pytest.raises(ConnectionRefusedError):  # nobody waits for an answer that cannot be given yet
            socket.create_connection((HOST, port), timeout=5)
        open_port(taken)
        socket.create_connection((HOST, port), timeout=5).close()
        with pytest.raises(DropkvError) as refused:
            take_port(HOST, port)
        assert str(refused.value) == refusal(port)


def test_an_address_of_another_machine_is_told_apart_from_a_taken_port() -> None:
    with pytest.raises(
        DropkvError, match=r"port 0 of 192\.0\.2\.1 cannot be taken \(Cannot assign.*: this machine has no"
    ) as told:
        take_port("192.0.2.1", 0)  # an address for examples, nobody's
    assert "--host 127.0.0.1" in str(told.value) and "--port" not in str(told.value)


def test_the_next_server_can_begin_while_old_connections_linger() -> None:
    with take_port(HOST, 0) as first:
        port = port_of(first)
        open_port(first)
        with socket.create_connection((HOST, port), timeout=5) as client:
            first.accept()[0].close()  # who closes first has to wait
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind((HOST, port))
    with take_port(HOST, port) as second:
        open_port(second)
        socket.create_connection((HOST, port), timeout=5).close()


def test_a_server_that_begins_to_listen_meanwhile_is_told_of() -> None:
    async def app(*_: object) -> None:
        raise AssertionError

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HOST, 0))
        port = port_of(other)
        taken = take_port(HOST, port)
        with pytest.raises(OSError, match="in use"):
            other.listen()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as on systems that heed only what bind was told
        other.listen()
        with pytest.raises(DropkvError) as refused:
            listen(app, taken, ready=lambda: None, leaving=lambda: None)
        assert str(refused.value) == refusal(port) and taken.fileno() == -1
