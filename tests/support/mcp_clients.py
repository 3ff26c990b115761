"""The official SDK's client of the Model Context Protocol, as an agent uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

Use = Callable[[Client], Awaitable[Any]]


def used_tools(url: str, key: str, use: Use) -> Any:
    """What comes of the client's use of the tools of a service."""

    async def connect() -> Any:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=120.0) as http:
            transport = streamable_http_client(f"{url}/mcp", http_client=http)
            async with Client(transport) as client:
                return await use(client)

    return asyncio.run(connect())
