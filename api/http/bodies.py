"""Bodies of requests that are held whole, in memory: their bytes are limited, by project and of all
together.

    body = ArrivingBody(request, most=1024**2)
    async with body.whole() as held: ...        held: bytearray, counted until the block ends

A body that has no room yet is not read, so that its client waits; before that, a connection holds
FREE_BYTES or little more (uvicorn). A body that arrives too slowly is given up: it holds the room
of the project's others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from api.http.gone_clients import DISCONNECTED
from ft_service.errors import FtError, SpecError
from ft_service.shared_work.places import Kind, Places

BYTES = 128 * 1024**2
"""Bytes of all bodies together."""
BYTES_OF_PROJECT = 64 * 1024**2
FREE_BYTES = 64 * 1024
"""A body of so many bytes needs no room: as many have arrived before it is read."""
LEAST_SECONDS = 60.0
LEAST_BYTES_A_SECOND = 64 * 1024
"""A body has LEAST_SECONDS to arrive, and a second for each so many bytes."""
_DRAINED_BYTES = 64 * 1024**2
"""Bytes of a refused body that are read and discarded, so that the client can read the refusal."""

_BODIES = Places(
    Kind(
        name="bodies",
        places=BYTES,
        of_project=BYTES_OF_PROJECT,
        waiting=64,
        seconds=60.0,
        busy="The bodies of other requests arrive, and hold all bytes that there are",
    )
)

PICTURES = Places(
    Kind(
        name="pictures",
        places=BYTES,
        of_project=BYTES_OF_PROJECT,
        waiting=64,
        seconds=60.0,
        busy="Images of other chats are held, and take all bytes that there are",
    )
)
"""Bytes of images that are held until the chats that show them are answered, or their answers
begin."""


class BodyTooLargeError(SpecError):
    """A body has more bytes than its route takes."""

    code = "request_too_large"


async def drain(stream: AsyncIterator[bytes], limit: int) -> None:
    """Read the rest of a body, up to a limit: closing a connection with unread data loses the
    answer.
    """
    async for chunk in stream:
        limit -= len(chunk)
        if limit < 0:
            return


class ArrivingBody:
    """The body of one request."""

    def __init__(self, request: Request, most: int) -> None:
        """`most`: limit of its bytes."""
        self.most = most
        principal = getattr(request.state, "principal", None)  # of api/http/auth.py
        self._project = "" if principal is None else principal.project_id
        self._stream = request.stream()
        self._held = bytearray()
        length = request.headers.get("content-length", "")
        self.size = min(int(length), most) if length.isdecimal() else most
        """Bytes that it has by its header; `most` without one, or with a larger number."""

    async def beginning(self, count: int) -> bytes:
        """Return the first bytes, `count` or more, or all of a shorter body; they stay in it."""
        while len(self._held) < count and await self._read():
            pass
        return bytes(self._held[:count])

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[bytearray]:
        """Yield the body, whose bytes count for its project until the block ends.

        Raises SpecError if it is too large or too slow, LimitError and UnavailableError as
        `Places.held`.
        """
        room = (
            nullcontext()
            if self.size <= FREE_BYTES
            else _BODIES.held(self._project, cost=self.size, size=self.size)
        )
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(room)
            except FtError:
                await self.drain()
                raise
            await self._read_whole()
            yield self._held

    async def drain(self) -> None:
        """Read the rest and discard it, up to a limit."""
        self._held.clear()
        await drain(self._stream, _DRAINED_BYTES)

    async def _read_whole(self) -> None:
        seconds = LEAST_SECONDS + self.size / LEAST_BYTES_A_SECOND
        try:
            async with asyncio.timeout(seconds):
                while len(self._held) <= self.most and await self._read():
                    pass
        except TimeoutError:
            self._held.clear()
            least = f"{LEAST_BYTES_A_SECOND:,} bytes a second"
            text = f"The body has not arrived within {seconds:.0f} s: send it at {least} or more."
            raise SpecError(text, code="request_too_slow") from None
        if len(self._held) > self.most:
            await self.drain()
            raise BodyTooLargeError(f"The body is larger than {self.most:,} bytes.")

    async def _read(self) -> bool:
        """Read a piece. Returns whether there was one."""
        try:
            chunk = await anext(self._stream, None)
        except ClientDisconnect:
            raise HTTPException(
                DISCONNECTED, "The client has closed the connection before its body had arrived."
            ) from None
        self._held += chunk or b""
        return chunk is not None
