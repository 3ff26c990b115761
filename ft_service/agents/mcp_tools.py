"""Environments of type `mcp`: the tools of an MCP server, by streamable HTTP.

The protocol is the official SDK's. Results are not compared with the schemas that the server
declares for them, as the SDK's own `call_tool` does: they are text for the model, and a pattern in
a schema could keep this process busy for ever.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from ft_service.agents.addresses import Access
from ft_service.agents.open_rollouts import AnsweredCall, OpenRollout
from ft_service.agents.playing import Message, Opening, Opens, Turn
from ft_service.agents.running import AgentError, AgentErrorKind
from ft_service.agents.shown_text import cut_text
from ft_service.host.pinned_transport import Allowance, PinnedTransport, shared_connections
from ft_service.host.webhook_receiver import AddressError, find_address
from ft_service.spec.environments import McpEnvironment

MOST_BYTES = 16 * 1024**2
MOST_VALUES = 2**19
"""Of all answers of a rollout together."""
MOST_TOOLS = 128
MOST_PAGES = 16
"""Of the list of tools."""
MOST_CALLS = 16
"""Calls of one answer that are carried out."""
CLOSE_SECONDS = 2.0
"""Time for the end of a session."""


@dataclass(frozen=True)
class _Server:
    """A server, for all rollouts of a step."""

    options: McpEnvironment
    make: Callable[[Allowance], httpx2.AsyncBaseTransport]
    """A transport of a rollout, by its allowance."""

    @asynccontextmanager
    async def opened(self, rollout: OpenRollout) -> AsyncIterator[_Session]:
        """Give a session of its own for a rollout. Raises AgentError."""
        allowance = Allowance(MOST_BYTES, MOST_VALUES)
        try:
            async with self._client(allowance) as client:
                yield _Session(client, allowance, self.options.max_answer_bytes)
        except Exception as error:  # libraries raise many kinds for servers of users, in groups
            raise _fault(error, allowance, "environment_unreachable") from None

    @asynccontextmanager
    async def _client(self, allowance: Allowance) -> AsyncIterator[Any]:
        from mcp.client.client import Client
        from mcp.client.streamable_http import streamable_http_client

        options = {
            "timeout": self.options.deadline_seconds,
            "headers": {"user-agent": "ft-service-rollouts"},
            "event_hooks": {"request": [_hurry_end]},
        }
        connections = self.make(allowance)
        async with httpx2.AsyncClient(transport=connections, trust_env=False, **options) as http:
            transport = streamable_http_client(self.options.url, http_client=http)
            async with Client(transport, cache=None) as client:
                yield client


async def _hurry_end(request: httpx2.Request) -> None:
    if request.method == "DELETE":
        waits = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = dict.fromkeys(waits, CLOSE_SECONDS)


@dataclass
class _Session:
    """One rollout's side of the server."""

    client: Any
    allowance: Allowance
    longest: int
    names: set[str] = field(default_factory=set[str])

    async def begin(self, item: Mapping[str, Any]) -> Opening:
        tools = await self._tools()
        self.names = {tool["function"]["name"] for tool in tools}
        return Opening(item["messages"], tools)

    async def answer(self, said: AnsweredCall) -> Turn:
        calls = said.message.get("tool_calls") or []
        if not calls or not all(_is_object(call["function"]["arguments"]) for call in calls):
            return Turn(ends=True)  # a conversation holds calls with objects as arguments alone
        told = [await self._told(number, call) for number, call in enumerate(calls)]
        return Turn(told)

    async def _tools(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        try:
            for _ in range(MOST_PAGES):
                page = await self.client.list_tools(cursor=cursor)
                found += map(_definition, page.tools)
                cursor = page.next_cursor
                if cursor is None or len(found) > MOST_TOOLS:
                    break
        except Exception as error:  # whatever a server answers
            raise _fault(error, self.allowance, "environment_failed") from None
        if not 0 < len(found) <= MOST_TOOLS or cursor is not None:
            why = f"the server offers no tools, or more than {MOST_TOOLS}"
            raise AgentError("environment_failed", why)
        return found

    async def _told(self, number: int, call: Mapping[str, Any]) -> Message:
        name = call["function"]["name"]
        if number >= MOST_CALLS:
            text = f"error: at most {MOST_CALLS} calls of an answer are carried out"
        elif name not in self.names:
            text = f"error: there is no tool {name[:200]}"
        else:
            text = await self._called(name, json.loads(call["function"]["arguments"]))
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}

    async def _called(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult

        params = CallToolRequestParams(name=name, arguments=arguments)
        try:
            result = await self.client.session.send_request(
                CallToolRequest(params=params), CallToolResult
            )
        except Exception as error:  # whatever a server answers
            if (refusal := _refusal(error)) is None or self.allowance.is_used:
                raise _fault(error, self.allowance, "environment_failed") from None
            return cut_text(f"error: {refusal}", self.longest)
        text = "\n".join(_text(part) for part in result.content)
        return cut_text(f"error: {text}" if result.is_error else text, self.longest)


@asynccontextmanager
async def mcp_servers(options: McpEnvironment, access: Access) -> AsyncIterator[Opens]:
    """Give what opens a session for a rollout, by an address that is found once."""
    for name in ("mcp.client", "mcp.shared"):  # what a user's server does is told to that user
        logging.getLogger(name).setLevel(logging.CRITICAL)
    receiver, secrets = await access.receiver(options)
    try:
        address = await find_address(receiver, allow_private=access.allow_private)
    except AddressError as error:
        raise AgentError("environment_unreachable", str(error)) from None
    async with shared_connections() as connections:

        def make(allowance: Allowance) -> PinnedTransport:
            return PinnedTransport(connections, receiver, address, secrets, allowance)

        yield _Server(options, make).opened


def _definition(tool: Any) -> dict[str, Any]:
    """A tool as in OpenAI's chat completions."""
    described = {} if tool.description is None else {"description": tool.description}
    parameters = {"parameters": tool.input_schema}
    return {"type": "function", "function": {"name": tool.name, **described, **parameters}}


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _text(part: Any) -> str:
    """A part of a result as the model reads it: of all but texts, that it is there."""
    return part.text if part.type == "text" else f"[{part.type}]"


def _refusal(error: Exception) -> str | None:
    """What the server says is wrong with a call; None: it is something else."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import INVALID_PARAMS

    if isinstance(error, MCPError) and error.error.code == INVALID_PARAMS:
        return error.error.message
    return None


def _fault(error: BaseException, allowance: Allowance, kind: AgentErrorKind) -> AgentError:
    """Why a server cannot be used, of a kind unless it is known better."""
    if allowance.is_used:
        why = f"the server has sent more than {MOST_BYTES:,} bytes, or {MOST_VALUES:,} values, "
        return AgentError("environment_flood", why + "in a rollout")
    found = list(_single(error))
    known = [own for own in found if isinstance(own, AgentError)]
    return known[0] if known else AgentError(kind, f"{type(found[0]).__name__}: {found[0]}")


def _single(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for own in error.exceptions:
            yield from _single(own)
    else:
        yield error
