"""The middleware of every request: a request id, security headers, a line in the log, metrics, and
an answer after a bug.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.wire.error_views import internal_error
from ft_service.ids import new_id
from ft_service.logs import about, fields
from ft_service.meters import Meters
from ft_service.traces import RequestSpan, Traces

log = logging.getLogger("ft_service.api")

INNER = "ft_service.inner"
"""Key in the scope of a request that the page makes within another; only the outer one is logged
and counted.
"""
_UNKNOWN = "none"
"""Route label of a request without a route: its path is the client's choice, and must not become a
label.
"""
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_UNLESS_GIVEN = (
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
"""Headers of answers that do not set them: the page and /docs run scripts of their own."""
_PROBES = ("/livez", "/readyz", "/metrics")
_JOB = "/v1/fine_tuning/jobs/{job_id}"
_WATCHED = (_JOB, f"{_JOB}/events", f"{_JOB}/metrics")
"""Routes that every viewer of a job polls."""


class RequestContext:
    """The outermost ASGI middleware, so that every answer and every log line of a request has
    `x-request-id`.
    """

    def __init__(self, app: ASGIApp, meters: Meters, traces: Traces | None = None) -> None:
        self._app = app
        self._meters = meters
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or INNER in scope:
            await self._app(scope, receive, send)
            return
        request_id = new_id("req_")
        started = time.perf_counter()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                took = str(round((time.perf_counter() - started) * 1000)).encode()
                headers = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", took),
                    *_ALWAYS,
                ]
                if rate := scope.get("state", {}).get("rate"):
                    headers += rate.headers()
                given = {name for name, _ in headers}
                message["headers"] = headers + [
                    header for header in _UNLESS_GIVEN if header[0] not in given
                ]
            await send(message)

        traced = (
            nullcontext()
            if self._traces is None
            else self._traces.request(scope["method"], scope["headers"])
        )
        with about(request_id=request_id), traced as span:
            try:
                await self._app(scope, receive, send_with_headers)
            except Exception:
                log.exception("%s %s failed", scope["method"], scope["path"])
                if (
                    status
                ):  # part of the answer was sent: only closing the connection shows the error
                    raise
                await internal_error(request_id)(scope, receive, send_with_headers)
            finally:
                self._note(scope, status, time.perf_counter() - started, span)

    def _note(self, scope: Scope, status: int, seconds: float, span: RequestSpan | None) -> None:
        """Count, trace and log the request: its path and ids, never the query, the body or the
        key.
        """
        route = getattr(scope.get("route"), "path", _UNKNOWN)
        self._meters.requests.labels(scope["method"], route, status).observe(seconds)
        is_routine = route in _PROBES or (
            scope["method"] == "GET" and (route in _WATCHED or route.startswith("/page/live/"))
        )
        level = logging.DEBUG if is_routine and status < 400 else logging.INFO
        details: dict[str, Any] = {
            "method": scope["method"],
            "route": route,
            "status": status,
            "seconds": round(seconds, 5),
        }
        if job_id := scope.get("path_params", {}).get("job_id"):
            details["job_id"] = job_id
        if principal := scope.get("state", {}).get("principal"):
            details |= {"project_id": principal.project_id, "key_id": principal.key_id}
        if span is not None and level > logging.DEBUG:  # one that is not ended is not sent
            span.end(route, status, job_id)
        log.log(level, "%s %s: %d", scope["method"], scope["path"], status, extra=fields(**details))
