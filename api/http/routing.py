"""Routes that check the key first, run in a thread, and serialise the answer in the same thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from api.http.auth import authenticated
from api.http.threads import in_thread, kind_of, turn
from api.wire.views import ErrorView
from ft_service.errors import SpecError

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorView}, "5XX": {"model": ErrorView}}


class ThreadRoute(APIRoute):
    """A route whose function waits for the database or the disk, so that it runs in a thread.

    FastAPI would use a thread a second time to validate and serialise the answer, and each change
    of threads costs as much as a statement of the database. Views are validated when they are made;
    the thread that made them serialises them.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(
            path,
            endpoint if inspect.iscoroutinefunction(endpoint) else _in_thread(endpoint),
            **options,
        )
        self.query_names = frozenset(_query_names(self.dependant))


def keyed_router(
    prefix: str, tag: str, checked_by: Callable[..., Any] = authenticated
) -> APIRouter:
    """Return a router whose routes all need a key, and refuse query parameters that they do not
    have. The key is checked here, and not only in functions with a caller, so that no body is read
    without a key.

    `checked_by`: the dependency that checks it.
    """
    needed = [Depends(checked_by), Depends(_known_query)]
    return APIRouter(
        prefix=prefix, tags=[tag], route_class=ThreadRoute, dependencies=needed, responses=ERRORS
    )


async def _known_query(request: Request) -> None:
    """Raise SpecError for a query parameter that the route does not have: a list that leaves out a
    filter, or keeps another order, looks like the one that was asked for.
    """
    route = request.scope["route"]
    for name in request.query_params:
        if name.partition("[")[0] not in route.query_names:
            known = ", ".join(sorted(route.query_names))
            have = f"it takes {known}" if known else "it takes none"
            message = (
                f"{name[:80]}: {request.method} {route.path_format} has no such query "
                f"parameter; {have}."
            )
            raise SpecError(message, param=name[:80], code="unknown_parameter")


def _query_names(dependant: Dependant) -> Iterator[str]:
    """Yield the names of query parameters of a route and of what it depends on."""
    for field in dependant.query_params:
        annotation = field.field_info.annotation
        if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
            yield from (inner.alias or name for name, inner in annotation.model_fields.items())
        else:
            yield field.alias
    for inner in dependant.dependencies:
        yield from _query_names(inner)


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
