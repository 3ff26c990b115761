"""How routes run: one way into a thread and back, with the answer already written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response


class ThreadRoute(APIRoute):
    """A route whose function waits for the database or the disk, so that it runs in a thread.

    FastAPI would go to a thread a second time to check and write the answer, and each way costs as much as a statement of the
    database. Views are checked when they are made; here the thread that made them writes them, too.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint if inspect.iscoroutinefunction(endpoint) else _in_thread(endpoint), **options)


def _in_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(endpoint)
    async def run(**arguments: Any) -> Any:
        return await run_in_threadpool(_answer, endpoint, arguments)

    return run


def _answer(endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    found = endpoint(**arguments)
    if isinstance(found, BaseModel):
        return Response(found.model_dump_json(), media_type="application/json")
    return found
