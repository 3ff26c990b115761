"""Limits on connections: on the time that a request takes to arrive, on the size of its headers,
and on their number. uvicorn itself closes only those that are idle after an answer.
"""

from __future__ import annotations

import asyncio
import resource
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 20.0
"""Limit on the arrival of a request's first line and headers, from the opening of the connection or
their first byte.
"""
HEADER_BYTES = 256 * 1024
"""Limit on a request's first line and headers, and on those that may follow its body.

The parser keeps what has arrived of a header, and copies it at each further piece, while nobody
else is served.
"""
BODY_SECONDS = 60.0
"""Limit on a pause in the arrival of a body while the server waits for it."""
_OTHER_FILES = 200
"""Open files of the process other than connections: the database's, logs, downloads."""
_FEWEST = 16


def possible_connections(wanted: int) -> int:
    """Return the number of connections to allow: `wanted`, but fewer than the files that the
    process may open.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        wanted if soft == resource.RLIM_INFINITY else max(_FEWEST, min(wanted, soft - _OTHER_FILES))
    )


def limited(
    most: int,
    header_seconds: float = HEADER_SECONDS,
    body_seconds: float = BODY_SECONDS,
    header_bytes: int = HEADER_BYTES,
) -> type[HttpToolsProtocol]:
    """Return the protocol class for uvicorn's connections of one server."""
    limits = {
        "most": most,
        "header_seconds": header_seconds,
        "body_seconds": body_seconds,
        "header_bytes": header_bytes,
    }
    return type("LimitedConnection", (_Connection,), {**limits, "waiting": {}})


class _Connection(HttpToolsProtocol):
    most: ClassVar[int]
    header_seconds: ClassVar[float]
    body_seconds: ClassVar[float]
    header_bytes: ClassVar[int]
    waiting: ClassVar[dict[_Connection, None]]
    """Connections without a running request, the one that waits longest first."""

    _headers_due: asyncio.TimerHandle | None = None
    _body_due: asyncio.TimerHandle | None = None
    _received_at = 0.0
    _has_begun = False
    """Part of a request has arrived."""
    _header_bytes = 0
    """Bytes that have arrived since headers, a piece of a body, or a request was complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_at = self.loop.time()
        if self._headers_due is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()
        self._has_begun = True
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > self.header_bytes:
            self._refuse_headers()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._header_bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        self._cancel_timers()
        super().on_headers_complete()
        self._body_due = self.loop.call_later(self.body_seconds, self._check_body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_due is not None:
            self._body_due.cancel()
        self._has_begun = False
        if not self.transport.is_closing() and self.cycle.response_complete:
            self.waiting[self] = None

    def _expect_headers(self) -> None:
        self.waiting[self] = None
        self._headers_due = self.loop.call_later(
            self.header_seconds, self._end, b"408 Request Timeout"
        )

    def _cancel_timers(self) -> None:
        self.waiting.pop(self, None)
        for timer in (self._headers_due, self._body_due):
            if timer is not None:
                timer.cancel()
        self._headers_due = self._body_due = None

    def _check_body(self) -> None:
        """Close a connection whose request is incomplete and has stopped arriving."""
        if self.transport.is_closing() or not self.cycle.more_body or self.cycle.response_complete:
            return
        left = self._received_at + self.body_seconds - self.loop.time()
        if left <= 0 and not self.flow.read_paused:
            self.transport.close()
            return
        self._body_due = self.loop.call_later(
            left if left > 0 else self.body_seconds, self._check_body
        )

    def _refuse_headers(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._end(b"431 Request Header Fields Too Large")
        else:  # those after the body of a request, whose answer may have begun
            self._cancel_timers()
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request, or else one of a project with
        more than half of all, or else this one: there is one too many.
        """
        for other in self.waiting:
            if other is not self:
                other._end(b"503 Service Unavailable")
                return
        if (other := self._one_of_too_many()) is not None:
            other.transport.abort()  # not `close`, which waits until the client has read
            return
        self._end(b"503 Service Unavailable", always=True)

    def _one_of_too_many(self) -> _Connection | None:
        """Return the connection whose client was silent for longest, of a project whose requests
        have more than half of the connections; None: no project has.
        """
        of_projects: dict[str, list[_Connection]] = {}
        for other in self.connections:
            if isinstance(other, _Connection) and (project_id := other._project_id()) is not None:
                of_projects.setdefault(project_id, []).append(other)
        largest = max(of_projects.values(), key=len, default=[])
        return (
            min(largest, key=lambda other: other._received_at)
            if len(largest) > self.most // 2
            else None
        )

    def _project_id(self) -> str | None:
        """Return the project of the request that runs; None: none runs, or its key is not checked
        yet.
        """
        if self.cycle is None or self.cycle.response_complete:
            return None
        principal = self.cycle.scope.get("state", {}).get("principal")  # of api/http/auth.py
        return None if principal is None else principal.project_id

    def _end(self, status: bytes, *, always: bool = False) -> None:
        """Close the connection. `always`: send the status even if no request has begun."""
        self._cancel_timers()
        if self.transport.is_closing():
            return
        if self._has_begun or always:
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
        self.transport.close()
