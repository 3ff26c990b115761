"""What a streamed answer holds open is closed, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.http.closing_response import ClosingResponse


async def parts() -> AsyncIterator[str]:
    yield "one"
    yield "two"


async def closed_by(send: Any) -> list[str]:
    """What is closed after an answer to a client that goes at once, or stays if it is sent
    everything.
    """
    closed: list[str] = []
    everything = asyncio.Event()

    async def close() -> None:
        await asyncio.sleep(0)
        closed.append("connection")

    async def receive() -> dict[str, Any]:
        if send is _sent:
            await everything.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await asyncio.wait_for(ClosingResponse(parts(), close)(scope, receive, send), 20)
    return closed


async def _sent(message: Any) -> None:
    pass


async def _never_sent(message: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("send", [_sent, _never_sent])
def test_it_is_closed_once(send: Any) -> None:
    assert asyncio.run(closed_by(send)) == ["connection"]
