"""How routes are found and run: keys first, then one way into a thread and back, with the answer already written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from api.http import dependencies
from api.http.auth import authenticated, bearer
from api.http.threads import in_thread, kind_of, turn
from api.wire.views import ErrorView

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorView}, "5XX": {"model": ErrorView}}


class ThreadRoute(APIRoute):
    """A route whose function waits for the database or the disk, so that it runs in a thread.

    FastAPI would go to a thread a second time to check and write the answer, and each way costs as much as a statement of the
    database. Views are checked when they are made; here the thread that made them writes them, too.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint if inspect.iscoroutinefunction(endpoint) else _in_thread(endpoint), **options)


class BareRoute(APIRoute):
    """A route for a function of (request, body, caller, services, idempotency_key), which FastAPI describes like any other.

    It is called without FastAPI's resolution of dependencies, which takes longer than storing a job.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        create = self.endpoint

        async def handle(request: Request) -> Response:
            services = await dependencies.services(request)
            caller = await authenticated(request, await bearer(request), services)
            body = await dependencies.json_body(request)
            return await create(request, body, caller, services, request.headers.get("idempotency-key"))

        return handle


def keyed_router(prefix: str, tag: str) -> APIRouter:
    """A router whose routes all need a key. It is checked here and not only in functions that ask for the caller, so that
    nobody without a key gets as far as sending a body.
    """
    needed = [Depends(authenticated)]
    return APIRouter(prefix=prefix, tags=[tag], route_class=ThreadRoute, dependencies=needed, responses=ERRORS)


def _in_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    kind = kind_of(endpoint)

    @wraps(endpoint)
    async def run(**arguments: Any) -> Any:
        return await in_thread(_answer, endpoint, arguments)

    @wraps(endpoint)
    async def run_in_turn(**arguments: Any) -> Any:
        assert kind is not None
        async with turn(kind):
            return await in_thread(_answer, endpoint, arguments)

    return run if kind is None else run_in_turn


def _answer(endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    answer = endpoint(**arguments)
    return written(answer) if isinstance(answer, BaseModel) else answer


def written(view: BaseModel) -> Response:
    """The answer that holds a view."""
    return Response(view.model_dump_json(), media_type="application/json")
