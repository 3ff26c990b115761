"""A local S3 for tests, with a bucket of its own for each."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from unittest import mock
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer


@contextmanager
def local_s3() -> Iterator[dict[str, str]]:
    """The environment in which s3fs finds it; it is set for this process too."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with mock.patch.dict(os.environ, environment):
            yield environment
    finally:
        server.stop()


def new_bucket() -> str:
    """URL of a prefix in an empty bucket."""
    name = f"test-{secrets.token_hex(4)}"
    # A file system of its own would begin with half a second for the description of the service.
    request = Request(
        f"{os.environ['AWS_ENDPOINT_URL']}/{name}", method="PUT", headers={"Content-Length": "0"}
    )
    with urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    return f"s3://{name}/ft"


class Gate(ThreadingHTTPServer):
    """In front of the local S3: it denies and holds requests by their method."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = urlsplit(behind).netloc
        self.denied: set[str] = set()
        """Methods that are answered by 403."""
        self.held: set[str] = set()
        """Methods that are answered once `open` is set."""
        self.open = threading.Event()
        self.asked: list[str] = []
        """Methods of the requests that came."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        gate, method = cast(Gate, self.server), self.command
        gate.asked.append(method)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if method in gate.held:
            gate.open.wait(60)
        if method in gate.denied:
            said = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self._answer(403, [("content-type", "application/xml")], said)
            return
        asked = HTTPConnection(gate.behind, timeout=60)
        try:
            asked.request(method, self.path, body, dict(self.headers.items()))
            answer = asked.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
        finally:
            asked.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        ours = ("content-length", "transfer-encoding", "connection", "server", "date")
        length = {name.lower(): value for name, value in headers}.get("content-length")
        for name, value in headers:
            if name.lower() not in ours:
                self.send_header(name, value)
        head = self.command == "HEAD"
        self.send_header("content-length", (length or "0") if head else str(len(body)))
        self.end_headers()
        if not head:
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def log_message(self, format: str, *words: object) -> None:
        pass


@contextmanager
def gated_s3() -> Iterator[Gate]:
    """A gate, through which s3fs finds the local S3 of `local_s3`."""
    gate = Gate(os.environ["AWS_ENDPOINT_URL"])
    thread = threading.Thread(target=gate.serve_forever, args=(0.05,))
    thread.start()
    try:
        with mock.patch.dict(
            os.environ, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{gate.server_port}"}
        ):
            yield gate
    finally:
        gate.open.set()
        gate.shutdown()
        thread.join()
        gate.server_close()
