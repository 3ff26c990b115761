"""The door for the client `AzureOpenAI`: Azure's paths, its query parameter and its header for the
key become those of `/v1`, before a route is chosen and the key is checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.wire.error_views import INVALID, error_response

_SERVED = (
    *("files", "uploads", "fine_tuning", "models", "chat/completions", "completions", "responses"),
    *("webhook_endpoints", "webhook_event_types", "evals"),
)
"""What Azure's paths lead to below `/v1`. Organisations and keys have one address only: a proxy may
close it.
"""
_ROOT = "/openai(?:/v1)?"
_PATH = re.compile(rf"{_ROOT}(/(?:{'|'.join(_SERVED)})(?:/.*)?)", re.DOTALL)
_OF_DEPLOYMENT = re.compile(rf"{_ROOT}/deployments/([^/].*?)(/(?:chat/)?completions)", re.DOTALL)
_VERSION = re.compile(rb"\d{4}-\d\d-\d\d(-[a-z]+)?|v1|latest|preview")
_VERSION_NAME = b"api-version="
"""Begin of the parameter that holds it, in a query."""
_Headers = Sequence[tuple[bytes, bytes]]


class AzurePaths:
    """ASGI middleware that changes the scope itself, not a copy of it: log, metrics and traces,
    which stand outside, read the same route as of a request to `/v1`.

    The body is left alone. Whoever parses it asks `deployment_of` for the model.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = _place(scope["path"]) if scope["type"] == "http" else None
        if place is None:
            await self._app(scope, receive, send)
            return
        query, versions = _without_version(scope["query_string"])
        for version in versions:
            if not _VERSION.fullmatch(version):
                await _refusal(version)(scope, receive, send)
                return
        scope["path"], deployment = place  # raw_path stays what was asked for: refusals name that
        scope["query_string"] = query
        scope["headers"] = _with_bearer(scope["headers"])
        scope.setdefault("state", {})["deployment"] = deployment
        await self._app(scope, receive, send)


def deployment_of(request: Request) -> str | None:
    """Return the model that the path of a request names; None: the body alone names one."""
    return getattr(request.state, "deployment", None)


def _place(path: str) -> tuple[str, str | None] | None:
    """Return the path here and the model that the path names, which is None for most; None: it is
    no path of Azure's, or nothing here serves it.
    """
    if found := _PATH.fullmatch(path):
        return f"/v1{found[1]}", None
    if found := _OF_DEPLOYMENT.fullmatch(path):
        return f"/v1{found[2]}", found[1]
    return None


def _without_version(query: bytes) -> tuple[bytes, list[bytes]]:
    """Return a query string without `api-version`, and the versions.

    The wire is the same in all of them, so that a request needs none.
    """
    parts = query.split(b"&")
    kept = [part for part in parts if not part.startswith(_VERSION_NAME)]
    versions = [part[len(_VERSION_NAME) :] for part in parts if part.startswith(_VERSION_NAME)]
    return b"&".join(kept), versions


def _with_bearer(headers: _Headers) -> _Headers:
    """Return headers with the key of `api-key` in `authorization`, unless that is there."""
    names = [name for name, _ in headers]
    if b"authorization" in names or b"api-key" not in names:
        return headers
    return [
        (b"authorization", b"Bearer " + value) if name == b"api-key" else (name, value)
        for name, value in headers
    ]


def _refusal(version: bytes) -> ASGIApp:
    shown = version[:80].decode("latin-1")
    message = (
        f"api-version = {shown!r}: must be a date such as 2024-10-21, which -preview may follow, "
        "or v1, latest or preview. Any of them will do, and none."
    )
    return error_response(400, message, kind=INVALID, param="api-version", code="invalid_value")
