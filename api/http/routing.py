"""Routes that check the key first, run in a thread, and serialise the answer in the same thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from api.http.auth import authenticated
from api.http.threads import in_thread, kind_of, turn
from api.wire.views import ErrorView

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorView}, "5XX": {"model": ErrorView}}


class ThreadRoute(APIRoute):
    """A route whose function waits for the database or the disk, so that it runs in a thread.

    FastAPI would use a thread a second time to validate and serialise the answer, and each change of threads costs as much as a
    statement of the database. Views are validated when they are made; the thread that made them serialises them.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint if inspect.iscoroutinefunction(endpoint) else _in_thread(endpoint), **options)


def keyed_router(prefix: str, tag: str) -> APIRouter:
    """Return a router whose routes all need a key. It is checked here, and not only in functions with a caller, so that no
    body is read without a key.
    """
    needed = [Depends(authenticated)]
    return APIRouter(prefix=prefix, tags=[tag], route_class=ThreadRoute, dependencies=needed, responses=ERRORS)


def _in_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    kind = kind_of(endpoint)

    @wraps(endpoint)
    async def run(**arguments: Any) -> Any:
        async with nullcontext() if kind is None else turn(kind):
            return await in_thread(_answer, endpoint, arguments)

    return run


def _answer(endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    answer = endpoint(**arguments)
    return written(answer) if isinstance(answer, BaseModel) else answer


def written(view: BaseModel) -> Response:
    """Return the answer that holds a view."""
    return Response(view.model_dump_json(), media_type="application/json")
