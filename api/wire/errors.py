"""Errors as OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`, all four keys always there."""

from __future__ import annotations

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from ft_service.errors import (
    AuthError,
    ConflictError,
    DataError,
    ForbiddenError,
    FtError,
    LimitError,
    NotFoundError,
    SpecError,
    UnavailableError,
)
from ft_service.host.disks import disk_fault

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
    UnavailableError: (503, SERVER),
    FtError: (500, SERVER),
}
"""HTTP status and `error.type` of each branch of the tree; a class that is not here takes its parent's."""


def install_handlers(app: FastAPI) -> None:
    """Answer every error of the application in the one shape."""
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
    """The answer to an unexpected error: it tells the user what to quote and nothing of the inside."""
    message = f"The service failed in a way it should not. The operator finds the cause in its log under {request_id}."
    # A client repeats a 5xx by default; the same request would hit the same fault.
    return error_response(500, message, kind=SERVER, code="internal_error", headers={"x-should-retry": "false"})


def error_body(error: FtError) -> dict[str, Any]:
    """The body of an error where no status can be sent any more: in the middle of a stream."""
    _, kind = _status(error)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _status(error: FtError) -> tuple[int, str]:
    return next(STATUS[parent] for parent in type(error).__mro__ if parent in STATUS)


def _ft_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FtError)
    status, kind = _status(error)
    return error_response(status, error.message, kind=kind, param=error.param, code=error.code, headers=_headers(status, error))


def _disk_error(request: Request, error: Exception) -> JSONResponse:
    """A full or read-only disk, whatever was to be written to it; any other OSError is a fault of ours, and raised again."""
    assert isinstance(error, OSError)
    fault = disk_fault(error)
    if fault is None:
        raise error
    log.warning("%s %s: %s", request.method, request.url.path, error)
    return _ft_error(request, fault)


def _headers(status: int, error: FtError) -> dict[str, str]:
    if status == 401:
        return {"www-authenticate": "Bearer"}
    # The rest of 5xx comes again however often it is tried; a 409 is a lost race and may be tried again.
    if isinstance(error, LimitError | UnavailableError) and error.retry_after is not None:
        return {"retry-after": str(math.ceil(error.retry_after))}
    # A client repeats a 429 too, which helps only where time does.
    return {"x-should-retry": "false"} if status >= 500 or status == 429 else {}


def _invalid_parameter(request: Request, error: Exception) -> JSONResponse:
    """Faults of query and path parameters, which FastAPI checks; the core checks bodies."""
    assert isinstance(error, RequestValidationError)
    fault: dict[str, Any] = error.errors()[0]
    name = ".".join(str(part) for part in fault["loc"][1:]) or "request"
    shown = repr(fault.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return error_response(400, f"{name} = {shown}: {fault['msg']}.", kind=INVALID, param=name, code="invalid_value")


def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Refusals by the framework itself: unknown routes, wrong methods."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_response(404, f"There is no route {asked}. /docs lists them.", kind=INVALID, code="unknown_url")
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
        message = f"{asked}: this path takes {headers['Allow']}."
        return error_response(405, message, kind=INVALID, code="method_not_allowed", headers=headers)
    return error_response(error.status_code, str(error.detail), kind=INVALID, code="invalid_request", headers=headers)


def _methods(request: Request) -> list[str]:
    """That the path takes, of all its routes: the framework knows those of the first."""
    routes = (route for route in request.app.router.routes if isinstance(route, Route))
    return sorted(
        {method for route in routes if route.matches(request.scope)[0] != Match.NONE for method in route.methods or ()}
    )
