"""As much of a model hub on loopback as huggingface_hub asks of one: revisions, trees, files by
range, and what goes wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One model, `org/tiny`, whose files are those of a folder."""

    folder: Path
    url: str = ""
    token: str = ""
    """The model is gated, and this opens it; empty: it is open to everybody."""
    breaks_after: int | None = None
    """The next larger file ends after so many bytes, and from then on nothing is sent; None: all
    is.
    """
    broken: bool = False
    holds_after: int | None = None
    """A larger file stops coming after so many bytes, until its receiver is gone; None: all come."""
    licence: str = "apache-2.0"
    damaged: str = ""
    """A file of which other bytes are sent than its digest says."""
    commit: str = COMMIT
    listed: dict[str, int] = field(default_factory=dict[str, int])
    """Name → bytes of files that are listed besides those of the folder."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(path, range) of every file that was sent."""

    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}


@contextlib.contextmanager
def hub_serving(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlparse(self.path)
        parts = unquote(url.path).strip("/").split("/")
        if "org/tiny" not in unquote(url.path):
            self._refuse(401, "RepoNotFound")
        elif (
            self.served.token
            and self.headers.get("authorization") != f"Bearer {self.served.token}"
            and "api" not in parts
        ):
            self._refuse(403, "GatedRepo")
        elif parts[:2] in (["api", "models"], ["api", "datasets"]):
            self._about(parts[4:])
        elif parts[0] == "datasets":
            self._file("/".join(parts[5:]))
        else:
            self._file("/".join(parts[4:]))

    def _about(self, rest: list[str]) -> None:
        what, revision = rest[:2] if rest else ("revision", "main")
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
            return
        files = [_listed(name, body) for name, body in self.served.files().items()]
        files += [
            {"type": "file", "path": name, "size": size, "oid": "0" * 40}
            for name, size in self.served.listed.items()
        ]
        if what == "tree":
            self._json(files)
            return
        siblings = [
            {"rfilename": file["path"], "size": file["size"], "lfs": file.get("lfs")}
            for file in files
        ]
        card = {"license": self.served.licence}
        self._json(
            {
                "id": "org/tiny",
                "sha": self.served.commit,
                "siblings": siblings,
                "cardData": card,
                "tags": [],
                "private": False,
            }
        )

    def _file(self, name: str) -> None:
        body = self.served.files().get(name)
        if self.served.broken:
            self._refuse(403, "")
        elif body is None:
            self._refuse(404, "EntryNotFound")
        else:
            self._send(name, body)

    def _send(self, name: str, body: bytes) -> None:
        etag = _listed(name, body).get("lfs", {}).get("oid") or hashlib.sha1(body).hexdigest()
        whole = len(body)
        if name == self.served.damaged:
            body = body[:-1] + bytes([body[-1] ^ 1])
        asked = self.headers.get("range", "")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(whole - start))
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.served.asked.append((name, asked))
        sent = body[start:]
        holds = self.served.holds_after
        if holds is not None and len(sent) > holds:
            self.wfile.write(sent[:holds])
            self.wfile.flush()
            with contextlib.suppress(ConnectionError):
                self.connection.recv(1)
            self.close_connection = True
            return
        breaks = self.served.breaks_after
        if breaks is not None and len(sent) > breaks:
            self.served.broken = True
            self.wfile.write(sent[:breaks])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(sent)

    def _json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _listed(name: str, body: bytes) -> dict[str, Any]:
    file: dict[str, Any] = {
        "type": "file",
        "path": name,
        "size": len(body),
        "oid": hashlib.sha1(body).hexdigest(),
    }
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(body).hexdigest()
        file["lfs"] = {"oid": digest, "sha256": digest, "size": len(body), "pointerSize": 134}
    return file
