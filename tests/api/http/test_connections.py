"""Connections that never finish a request, and too many of them, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from api.http.connections import limited, possible_connections
from tests.support.rest.service import wait_until

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Says how long the body is. The path is the project of the key."""
    if scope["type"] != "http":
        return
    if scope["path"] != "/":
        scope["state"]["principal"] = SimpleNamespace(project_id=scope["path"])
    length = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length = length + len(message["body"])
        more = message["more_body"]
    body = str(length).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})


Connect = Callable[[], socket.socket]


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[Connect]:
    config = uvicorn.Config(
        application,
        http=limited(**limits),
        log_level="critical",
        timeout_keep_alive=60,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    with contextlib.ExitStack() as stack, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            wait_until(lambda: server.started)
            address = listener.getsockname()

            def connect() -> socket.socket:
                return stack.enter_context(socket.create_connection(address, timeout=60))

            yield connect
        finally:
            server.should_exit = True
            thread.join()


def ended(connection: socket.socket) -> bytes:
    """What came before the server ended the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1000):
            said += part
    return said


def answer(connection: socket.socket) -> bytes:
    """One whole answer of the application."""
    said = b""
    while b"\r\n\r\n" not in said or said.endswith(b"\r\n\r\n"):
        part = connection.recv(1000)
        assert part, said
        said += part
    return said


def begin(connection: socket.socket, path: bytes = b"/") -> None:
    """Have a request answered that lacks one byte of its body."""
    connection.sendall(
        b"POST "
        + path
        + b" HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n"
    )
    assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")


def drip(connection: socket.socket, byte: bytes) -> bytes:
    """Send the same byte until the server ends the connection; what it said."""
    connection.settimeout(0.05)
    said = b""
    for _ in range(1200):
        try:
            connection.sendall(byte)
            part = connection.recv(1000)
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return said
        if not part:
            return said
        said += part
    pytest.fail("the server never ended it")


def test_who_sends_nothing_or_never_ends_its_headers_is_ended() -> None:
    with serving(most=10, header_seconds=1.0) as connect:
        half = connect()
        # At once: who has said nothing by then hears nothing.
        half.sendall(b"GET / HTTP/1.1\r\nx-header: ")
        silent = connect()
        assert ended(silent) == b""
        assert drip(half, b"a").startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("byte", [b"a", b"\n", b"\r\n"])
def test_neither_does_it_help_to_have_finished_a_request_before(byte: bytes) -> None:
    with serving(most=10, header_seconds=2.0) as connect:
        connection = connect()
        for _ in range(2):
            connection.sendall(REQUEST)
            assert answer(connection).startswith(b"HTTP/1.1 200 ")
        drip(connection, byte)


def test_a_body_that_goes_on_may_take_its_time_and_one_that_does_not_is_ended() -> None:
    with serving(most=10, header_seconds=2.0, body_seconds=2.5) as connect:
        slow = connect()
        stopped = connect()
        for connection in (slow, stopped):
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\n")
        for _ in range(6):
            time.sleep(0.5)
            slow.sendall(b"x")
        assert answer(slow).endswith(b"\r\n\r\n6")
        assert ended(stopped) == b""


@pytest.mark.parametrize("start", [b"GET /", REQUEST[:-2] + b"x-header: ", REQUEST * 2 + b"GET /"])
def test_headers_that_never_end_are_ended_at_a_size(start: bytes) -> None:
    with serving(most=10, header_bytes=2000) as connect:
        connection = connect()
        connection.sendall(start)
        said = b""
        while said.count(b"HTTP/1.1 200 ") < start.count(
            b"\r\n\r\n"
        ):  # both answers may arrive at once
            said += answer(connection)
        connection.sendall(b"a" * 1000)
        time.sleep(0.02)
        connection.sendall(b"a" * 1001)
        assert ended(connection).startswith(b"HTTP/1.1 431 ")


def test_so_are_those_after_a_body_which_itself_may_be_long() -> None:
    with serving(most=10, header_bytes=2000) as connect:
        long = connect()
        endless = connect()
        long.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n" + b"x" * 9000)
        assert answer(long).endswith(b"\r\n\r\n9000")
        endless.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: "
            b"chunked\r\n\r\n1\r\nx\r\n0\r\nx-trailer: "
        )
        time.sleep(0.02)
        endless.sendall(b"a" * 2001)
        assert ended(endless) == b""


def test_of_too_many_those_who_ask_for_nothing_go_first() -> None:
    with serving(most=3, header_seconds=60.0) as connect:
        busy = connect()
        begin(busy)
        silent = [connect() for _ in range(2)]
        newest = connect()
        newest.sendall(REQUEST)
        assert answer(newest).startswith(b"HTTP/1.1 200 ")
        assert ended(silent[0]) == b""
        busy.sendall(b"x")
        assert answer(busy).startswith(b"HTTP/1.1 200 ")


def test_where_all_are_busy_the_newest_is_refused() -> None:
    with serving(most=2) as connect:
        busy = [connect() for _ in range(2)]
        for connection in busy:
            begin(connection)
        assert ended(connect()).startswith(b"HTTP/1.1 503 ")
        for connection in busy:
            connection.sendall(b"x")
            assert answer(connection).startswith(b"HTTP/1.1 200 ")


def test_a_project_with_most_connections_makes_room_for_others_and_they_for_nobody() -> None:
    with serving(most=4) as connect:
        own = [connect() for _ in range(3)]
        other = connect()
        for connection in own:
            begin(connection, b"/own")
        begin(other, b"/other")
        newest = connect()
        begin(newest, b"/other")
        assert ended(own[0]) == b""
        assert ended(connect()).startswith(b"HTTP/1.1 503 ")
        for connection in (*own[1:], other, newest):
            connection.sendall(b"x")
            assert answer(connection).startswith(b"HTTP/1.1 200 ")


def test_there_are_fewer_than_the_process_may_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 824), (100_000, 1000), (100, 16), (resource.RLIM_INFINITY, 1000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert possible_connections(1000) == most
