"""HTTP to a server that a user has chosen, by a client that some library drives.

Every request goes to exactly the address that was checked (webhook_receiver.py), whatever its URL
says, is signed as webhooks are if there are secrets, and all that comes back counts against one
allowance: a server could send any amount.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import httpx2

from ft_service.host.signed_post import SignedMessage, trusted_context
from ft_service.host.webhook_receiver import Receiver
from ft_service.ids import new_id

IDLE_SECONDS = 1.0
"""After which a connection is not used again. Many servers close theirs after 5 idle seconds, and
what is sent at that moment is lost.
"""


class AllowanceUsedError(httpx2.TransportError):
    """A server has sent more than it may."""


@dataclass
class Allowance:
    """What a server may still send."""

    bytes: int
    values: int
    """Brackets and commas: the interpreter is busy for as long as it takes to parse them."""
    is_used: bool = False

    def take(self, part: bytes) -> None:
        """Raises AllowanceUsedError."""
        self.bytes -= len(part)
        self.values -= sum(map(part.count, (b"[", b"{", b",")))
        if self.bytes < 0 or self.values < 0:
            self.is_used = True
            raise AllowanceUsedError("the server has sent more than a rollout may have")


class _Counted(httpx2.AsyncByteStream):
    """The body of an answer."""

    def __init__(self, body: httpx2.AsyncByteStream, allowance: Allowance) -> None:
        self._body = body
        self._allowance = allowance

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            self._allowance.take(part)
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


class PinnedTransport(httpx2.AsyncBaseTransport):
    """A transport of one client; connections are those of `connections`, which others may share."""

    def __init__(
        self,
        connections: httpx2.AsyncBaseTransport,
        receiver: Receiver,
        address: str,
        secrets: Sequence[str],
        allowance: Allowance,
    ) -> None:
        self._connections = connections
        self._receiver = receiver
        self._address = address
        self._secrets = secrets
        self._allowance = allowance

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises httpx2.TransportError, also for a URL of another server."""
        asked = request.url.host, request.url.port or self._receiver.port
        if asked != (self._receiver.host, self._receiver.port):
            raise httpx2.UnsupportedProtocol(f"{request.url.host} is another server")
        request.headers["accept-encoding"] = "identity"
        request.headers.update(self._signature(await request.aread()))
        request.url = request.url.copy_with(host=self._address)
        request.extensions = {**request.extensions, "sni_hostname": self._receiver.host}
        answer = await self._connections.handle_async_request(request)
        body = cast(httpx2.AsyncByteStream, answer.stream)
        answer.stream = _Counted(body, self._allowance)
        return answer

    def _signature(self, body: bytes) -> dict[str, str]:
        if not self._secrets:
            return {}
        return SignedMessage(new_id("call_"), body, self._secrets).headers(int(time.time()))


@asynccontextmanager
async def shared_connections() -> AsyncIterator[httpx2.AsyncBaseTransport]:
    """Give connections for several transports, which use neither a proxy nor a credential of the
    environment.
    """
    limits = httpx2.Limits(
        max_connections=None,
        max_keepalive_connections=128,
        keepalive_expiry=IDLE_SECONDS,
    )
    transport = httpx2.AsyncHTTPTransport(verify=trusted_context(), trust_env=False, limits=limits)
    async with transport:
        yield transport
