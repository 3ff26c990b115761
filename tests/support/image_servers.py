"""A server of images that does whatever it likes, on this host and as if it were public."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ft_service.host import public_fetch
from tests.support.image_bases import drawn, encoded

PNG = encoded(drawn())
ASKED = Counter[str]()


class Hostile(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ASKED[self.path] += 1
        if self.path == "/loop":
            self._answer(302, b"", location="/loop")
        elif self.path == "/there":
            self._answer(302, b"", location="/good.png")
        elif self.path == "/file":
            self._answer(302, b"", location="file:///etc/passwd")
        elif self.path == "/large":
            self._answer(200, b"x" * 5000)
        elif self.path == "/page":
            self._answer(200, b"<!DOCTYPE html>")
        elif self.path == "/endless":
            self._endless()
        elif self.path == "/flood":
            self._endless(b"x" * 65536, pause=0.0)
        elif self.path == "/inside":
            self._answer(302, b"", location="https://10.0.0.1/a.png")
        elif self.path == "/good.png":
            self._answer(200, PNG)
        else:
            self._answer(404, b"no")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _endless(self, part: bytes = b"x", pause: float = 0.05) -> None:
        """Now and then a byte, so that no wait for the network is long; or a flood."""
        self.send_response(200)
        self.end_headers()
        for _ in range(200):
            try:
                self.wfile.write(part)
                self.wfile.flush()
            except OSError:
                return
            time.sleep(pause)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def serving_images() -> Iterator[str]:
    """The server's URL, while the block runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def public_images(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server's URL, which counts as a public one, while all others are looked at as ever."""
    parse, find = public_fetch.parse_receiver, public_fetch.address_of
    with serving_images() as url:

        def parsed(given: str, *, allow_private: bool) -> Any:
            return parse(given, allow_private=allow_private or given.startswith(url))

        def address(receiver: Any, found: Any, *, allow_private: bool) -> str:
            is_own = str(receiver.url).startswith(url)
            return find(receiver, found, allow_private=allow_private or is_own)

        monkeypatch.setattr(public_fetch, "parse_receiver", parsed)
        monkeypatch.setattr(public_fetch, "address_of", address)
        yield url
