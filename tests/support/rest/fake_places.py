"""A Hugging Face Hub and an OCI registry, as far as a push uses them: what arrives is kept by
name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class FakePlace:
    address: str = ""
    """HOST:PORT."""
    key: str | None = None
    """What the hub wants; None: nothing."""
    made: list[dict[str, Any]] = field(default_factory=list)
    """Repositories."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Of commits, and blobs by digest."""
    manifests: dict[str, Any] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    place: FakePlace
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        path = urlsplit(self.path).path
        if path.startswith("/v2/"):
            self._answer(202, b"", {"location": f"{path}one"})
        elif self.place.key and self.headers["authorization"] != f"Bearer {self.place.key}":
            self._answer(401, b'{"error": "Invalid credentials"}')
        elif path == "/api/repos/create":
            self.place.made.append(json.loads(body))
            self._json({"url": f"http://{self.place.address}/org/name", "id": "1"})
        elif "/preupload/" in path:
            names = [one["path"] for one in json.loads(body)["files"]]
            self._json(
                {
                    "files": [
                        {"path": name, "uploadMode": "regular", "shouldIgnore": False}
                        for name in names
                    ]
                }
            )
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.place.files[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
            url = f"http://{self.place.address}/org/name/commit/abc"
            self._json({"success": True, "commitOid": "abc", "commitUrl": url, "hookOutput": ""})
        else:
            self._json({})

    def do_GET(self) -> None:
        self._json({"id": "org/name", "sha": "abc", "siblings": [], "private": True})

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def do_PUT(self) -> None:
        body = self._body()
        parts = urlsplit(self.path)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if "/manifests/" in parts.path:
            self.place.manifests[parts.path.removeprefix("/v2/")] = json.loads(body)
        else:
            assert parse_qs(parts.query)["digest"] == [digest]
            self.place.files[digest] = body
        self._answer(201, b"", {"Docker-Content-Digest": digest})

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, answer: Any) -> None:
        self._answer(200, json.dumps(answer).encode(), {"content-type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_place() -> Iterator[FakePlace]:
    place = FakePlace()
    handler = type("Handler", (_Handler,), {"place": place})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        place.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield place
        finally:
            server.shutdown()
            thread.join()
