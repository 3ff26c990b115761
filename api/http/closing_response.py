"""Streamed answers that hold something open, such as a connection, until they have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

NOT_BUFFERED = {"x-accel-buffering": "no"}
"""Header of an answer that a proxy must pass on while it is made."""


class ClosingResponse(StreamingResponse):
    """A streamed answer that closes what it reads from when it has ended, also if its client went
    before the first part.
    """

    def __init__(
        self,
        body: AsyncIterator[str | bytes],
        close: Callable[[], Awaitable[None]],
        *,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        """`close`: awaited once."""
        super().__init__(body, status_code, {**(headers or {}), **NOT_BUFFERED}, media_type)
        self.close = close
        """What `body` reads from is closed by it; awaited once, when the answer has ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # not in the iterator: it is never closed if the client goes before its first part
            with anyio.CancelScope(shield=True):
                await self.close()
