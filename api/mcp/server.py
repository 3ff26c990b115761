"""`POST /mcp`: the tools by the official SDK, one answer for each request, without sessions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from fastapi import FastAPI, Request, Response
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from api.http.auth import Caller
from api.http.origins import other_origin
from api.http.routing import keyed_router
from api.mcp.tools import MOST_CHARACTERS, TOOLS, Tool
from api.page.inner_api import OF_KEY, ApiError, InnerApi
from ft_service.errors import ForbiddenError, SpecError
from ft_service.spec import spec_error
from ft_service.version import this_version

_INSTRUCTIONS = (
    "Fine-tuning on the user's own machines. The way to a tuned model: models, upload_data, "
    "check_data, show_samples, plan, submit with the plan's id, wait until the job has ended, "
    "evaluation or chat, export. A refusal names the field, its value, the limit and what to "
    "change: change that, and do not repeat the call as it was."
)
_MOST_BODY = 2 * MOST_CHARACTERS
"""Bytes of a request: a file's text with JSON's escapes."""


class _Answer(Response):
    """An answer that the SDK writes."""

    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        super().__init__()
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)


def install(app: FastAPI) -> None:
    """Give an application the route and what runs beside it."""
    server = Server(
        "ft-service",
        version=this_version(),
        instructions=_INSTRUCTIONS,
        on_list_tools=_listed,
        on_call_tool=_called,
    )
    manager = StreamableHTTPSessionManager(
        server, json_response=True, stateless=True, max_request_body_size=_MOST_BODY
    )
    router = keyed_router("/mcp", "mcp")

    @router.post("", include_in_schema=False)
    async def serve(request: Request, caller: Caller) -> Response:
        """Answer a message of the protocol."""
        if (origin := other_origin(request)) is not None:
            raise ForbiddenError(
                f"Origin = {origin[:80]!r}: pages of other sites may not ask here."
            )
        return _Answer(manager)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with manager.run():
            yield

    app.router.routes.extend(router.routes)
    app.router.lifespan_context = lifespan


async def _listed(
    context: ServerRequestContext[Any, Any], params: types.PaginatedRequestParams | None
) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[_definition(tool) for tool in TOOLS.values()])


async def _called(
    context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
) -> types.CallToolResult:
    tool = TOOLS.get(params.name)
    if tool is None:
        return _refused(f"There is no tool {params.name[:80]!r}. There are: {', '.join(TOOLS)}.")
    try:
        arguments = tool.arguments.model_validate(params.arguments or {})
    except ValidationError as error:
        return _refused(spec_error(error, tool.arguments).message)
    try:
        assert context.request is not None, "of the route"
        found, sentence = await tool.call(InnerApi(context.request, OF_KEY), arguments)
    except ApiError as error:
        return _refused(error.message, error.error)
    except SpecError as error:
        return _refused(error.message, {"param": error.param, "code": error.code})
    text = f"{sentence}\n{json.dumps(found, ensure_ascii=False)}"
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)], structured_content=found
    )


def _refused(message: str, error: dict[str, Any] | None = None) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=message)],
        structured_content={"error": {"message": message, **(error or {})}},
        is_error=True,
    )


def _definition(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.arguments.model_json_schema(),
        annotations=types.ToolAnnotations(read_only_hint=not tool.changes),
    )
