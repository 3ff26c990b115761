"""Holders of keys and of browsers' sessions, remembered for a moment."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from ft_service.store.records import Principal
from ft_service.store.sql import Store

REMEMBERED_SECONDS = 1.0
"""How long a key that was revoked, or has expired, may still open. Without this every request would begin with a look into the
database."""
_MOST = 10_000
"""Keys that are remembered at once."""


class Holders:
    """Looks up keys in the database and remembers those that are valid: a new key works at once."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[bytes, tuple[Principal, float]] = {}

    async def find(self, secret: str) -> Principal | None:
        """The holder of a key. None: the key is not valid. Raises UnavailableError if the database does not answer."""
        return await self._find(_digest(secret), self._store.authenticate, secret)

    async def find_session(self, secret: str) -> Principal | None:
        """The holder of a browser's session, as `find`."""
        return await self._find(_digest(f"session {secret}"), self._store.session_holder, secret)

    def forget_session(self, secret: str) -> None:
        """Look a session up anew: it was ended."""
        self._known.pop(_digest(f"session {secret}"), None)

    async def _find(self, digest: bytes, look_up: Callable[[str], Principal | None], secret: str) -> Principal | None:
        principal, until = self._known.get(digest, (None, 0.0))
        if principal and self._clock() < until:
            return principal
        principal = await run_in_threadpool(look_up, secret)
        self._remember(digest, principal)
        return principal

    def _remember(self, digest: bytes, principal: Principal | None) -> None:
        if principal is None:
            self._known.pop(digest, None)
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[digest] = (principal, self._clock() + REMEMBERED_SECONDS)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
