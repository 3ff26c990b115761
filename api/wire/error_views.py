"""Errors as OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`, all four keys
always there.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from ft_service.errors import (
    AuthError,
    ConflictError,
    DataError,
    ForbiddenError,
    FtError,
    LimitError,
    NotFoundError,
    OtherVersionError,
    SpecError,
    UnavailableError,
)
from ft_service.host.disk import disk_fault
from ft_service.settings import Settings
from ft_service.spec.validation_errors import words_of

log = logging.getLogger("ft_service.api")

INVALID = "invalid_request_error"
SERVER = "server_error"

STATUS: dict[type[FtError], tuple[int, str]] = {
    SpecError: (400, INVALID),
    DataError: (400, INVALID),
    NotFoundError: (404, INVALID),
    AuthError: (401, INVALID),
    ForbiddenError: (403, INVALID),
    LimitError: (429, "rate_limit_error"),
    ConflictError: (409, "conflict_error"),
    OtherVersionError: (409, "conflict_error"),
    UnavailableError: (503, SERVER),
    FtError: (500, SERVER),
}
"""HTTP status and `error.type` of each class; a class that is missing has its parent's."""

_OTHER_ROUTES = {
    "/v1/responses": "a response is made while its caller waits, and found by its id if it was "
    "asked for with store: true",
    "/v1/fine-tunes": "fine-tuning is /v1/fine_tuning/jobs",
}
"""Routes that OpenAI has or had, and what serves their purpose here."""


def install_handlers(app: FastAPI) -> None:
    """Answer every error of the application with this body."""
    app.add_exception_handler(FtError, _ft_error)
    app.add_exception_handler(OSError, _disk_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameter)
    app.add_exception_handler(HTTPException, _http_error)


def error_response(
    status: int,
    message: str,
    *,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


def internal_error(request_id: str) -> JSONResponse:
    """Return the answer to an unexpected error: an id that the user can quote, and no internals."""
    message = (
        "The service failed unexpectedly. The operator finds the cause in its log under "
        f"{request_id}."
    )
    # A client repeats a 5xx by default, and the same request would fail again.
    return error_response(
        500, message, kind=SERVER, code="internal_error", headers={"x-should-retry": "false"}
    )


def error_body(settings: Settings, error: FtError) -> dict[str, Any]:
    """Return the body of an error in the middle of a stream, where no status can be sent."""
    _, kind = _status(error)
    message = settings.without_paths(error.message)
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def _status(error: FtError) -> tuple[int, str]:
    return next(STATUS[parent] for parent in type(error).__mro__ if parent in STATUS)


def _ft_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FtError)
    status, kind = _status(error)
    # A tenant is told the name of a base, not where the operator keeps it.
    message = request.app.state.services.settings.without_paths(error.message)
    if message != error.message:
        log.info("%s %s: %s", request.method, request.url.path, error.message)
    return error_response(
        status,
        message,
        kind=kind,
        param=error.param,
        code=error.code,
        headers=_headers(status, error),
    )


def _disk_error(request: Request, error: Exception) -> JSONResponse:
    """Answer the error of a full or read-only disk.

    Any other OSError is a bug, and raised again.
    """
    assert isinstance(error, OSError)
    fault = disk_fault(error)
    if fault is None:
        raise error
    log.warning("%s %s: %s", request.method, request.url.path, error)
    return _ft_error(request, fault)


def _headers(status: int, error: FtError) -> dict[str, str]:
    if status == 401:
        return {"www-authenticate": "Bearer"}
    # Other 5xx errors do not go away by trying again; a 409 is a lost race and may be tried again.
    if isinstance(error, LimitError | UnavailableError) and error.retry_after is not None:
        return {"retry-after": str(math.ceil(error.retry_after))}
    # A client repeats a 429 too, which helps only if it depends on time.
    is_final = status >= 500 or status == 429 or isinstance(error, OtherVersionError)
    return {"x-should-retry": "false"} if is_final else {}


def _invalid_parameter(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"error": invalid_parameter(error)}, status_code=400)


def invalid_parameter(error: RequestValidationError) -> dict[str, Any]:
    """Return OpenAI's error object for a query or path parameter, which FastAPI checks; ft_service
    checks bodies.
    """
    fault: dict[str, Any] = error.errors()[0]
    name = ".".join(str(part) for part in fault["loc"][1:]) or "request"
    shown = repr(fault.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return {
        "message": f"{name} = {shown}: {words_of(fault)}.",
        "type": INVALID,
        "param": name,
        "code": "invalid_value",
    }


def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer refusals by the framework: unknown routes, wrong methods."""
    assert isinstance(error, HTTPException)
    operation = f"{request.method} {_asked_path(request)}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return unknown_route(request)
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
        message = f"{operation}: this path takes {headers['Allow']}."
        return error_response(
            405, message, kind=INVALID, code="method_not_allowed", headers=headers
        )
    return error_response(
        error.status_code, str(error.detail), kind=INVALID, code="invalid_request", headers=headers
    )


def unknown_route(request: Request) -> JSONResponse:
    """Return the refusal of a path that no route has."""
    path = _asked_path(request)
    message = f"There is no route {request.method} {path}{_what_instead(request, path)}"
    return error_response(404, message, kind=INVALID, code="unknown_url")


def _asked_path(request: Request) -> str:
    """Return the path that the client asked for, which is another one than that of the route if it
    is one of Azure's (api/http/azure_paths.py).
    """
    return unquote(request.scope["raw_path"].decode("latin-1"))


def _what_instead(request: Request, path: str) -> str:
    """Return the end of the sentence that refuses an unknown route: what a client of OpenAI's API
    has to change.
    """
    path = path.rstrip("/")
    here = "/v1" + re.sub(r"^(/openai)?(/v1)*(/deployments/[^/]+(?=/))?", "", path)
    others = (why for route, why in _OTHER_ROUTES.items() if f"{here}/".startswith(f"{route}/"))
    if other := next(others, None):
        return f": {other}. /docs lists all routes."
    scope = {**request.scope, "path": here}
    if not any(
        _serves(route, scope) for route in request.app.router.routes if isinstance(route, Route)
    ):
        return ". /docs lists them."
    if here == path:
        return f": it is {here} here, without a slash at its end."
    return f": it is {here} here. The path of a client's base_url is /v1."


def _serves(route: Route, scope: Scope) -> bool:
    return route.path.startswith("/v1/") and route.matches(scope)[0] != Match.NONE


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes of the path; the framework knows those of the first route
    only.
    """
    routes = (route for route in request.app.router.routes if isinstance(route, Route))
    return sorted(
        {
            method
            for route in routes
            if route.matches(request.scope)[0] != Match.NONE
            for method in route.methods or ()
        }
    )
