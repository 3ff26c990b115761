"""An HTTP server of a test's own, on a free port: it records what arrives and answers what the test
says.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], Iterator[bytes]]


@dataclass
class Receiver:
    """`answer` may be replaced while it runs."""

    url: str = ""
    answer: Callable[[Received], Answer] = field(default=lambda _: (200, {}, iter(())))
    arrived: Queue[Received] = field(default_factory=Queue)


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received = Received(
                self.path, {name.lower(): value for name, value in self.headers.items()}, body
            )
            receiver.arrived.put(received)
            status, headers, chunks = receiver.answer(received)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(chunk)
                self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def hanging() -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a server that takes connections and never says a word, and what ends all of
    them.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", listener.close
