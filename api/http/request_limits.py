"""Request limits of projects: a bucket that holds the requests of a minute and refills evenly.

A single server keeps the buckets itself. Servers that share a PostgreSQL keep them there
(ft_service/store/tenants/request_buckets.py) and draw a few requests at once, so that the limit
holds over all servers, and most requests need no statement of the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from api.http.threads import in_thread_of
from ft_service.errors import UnavailableError
from ft_service.store.sql import Store
from ft_service.store.tenants.request_buckets import MINUTE, Drawn

_MOST = 10_000
"""Projects whose buckets are kept."""
_PARTS = 50
"""A server draws one of so many parts of a minute's requests at once, which is the most that it can
hold unused.
"""
_HELD_SECONDS = 2.0
"""Time after which drawn requests that are unused go back, with the next request."""

Draw = Callable[[str, int, int, int], Awaitable[Drawn]]
"""Draws from a bucket. Arguments: project id, requests per minute, requests wanted, requests
returned before.
"""


@dataclass(frozen=True)
class Rate:
    """The state of a project's bucket after a request."""

    limit: int
    remaining: int
    full_after: float
    """Seconds until the bucket is full again."""
    wait: float
    """Seconds until this request may be sent; 0: now."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's rate limit headers."""
        values = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.full_after:.3f}s",
        }
        return [(name.encode(), value.encode()) for name, value in values.items()]


@dataclass
class _DrawnRequests:
    """Requests that this server has drawn from a project's bucket."""

    left: int = 0
    full_after: float = 0.0
    """Seconds until the bucket was full, at the time of the last draw."""
    drawn_at: float = float("-inf")
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One request draws; others wait for it."""


class Rates:
    """Buckets of projects. For one event loop."""

    def __init__(
        self, draw: Draw | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`draw`: draws from buckets that several servers share; None: this server keeps its
        own.
        """
        self._clock = clock
        self._shared = draw is not None
        self._draw = draw or self._draw_own
        self._own: dict[str, float] = {}
        self._held: dict[str, _DrawnRequests] = {}

    @classmethod
    def of(cls, store: Store) -> Rates:
        """Return limits that use the store's buckets, if servers may share the store."""

        async def draw(project_id: str, per_minute: int, wanted: int, returned: int) -> Drawn:
            given = (project_id, per_minute, wanted, returned)
            return await in_thread_of(
                project_id, lambda: store.request_buckets.draw_requests(*given)
            )

        return cls(draw if store.is_shared else None)

    async def take(self, project_id: str, per_minute: int) -> Rate:
        """Count a request of a project, if it may be sent."""
        if len(self._held) >= _MOST and project_id not in self._held:
            self._held.clear()
        held = self._held.setdefault(project_id, _DrawnRequests())
        if not self._needs_no_draw(held, per_minute):
            async with held.turn:
                if not self._needs_no_draw(held, per_minute):
                    await self._fill(held, project_id, per_minute)
        each = MINUTE / per_minute
        full_after = max(0.0, held.full_after - (self._clock() - held.drawn_at))
        if held.left == 0:
            return Rate(per_minute, 0, full_after, max(full_after - MINUTE + each, 0.001))
        held.left -= 1
        full_after += held.left * -each
        remaining = min(per_minute - 1, int((MINUTE - full_after) / each + 1e-6))
        return Rate(per_minute, max(0, remaining), max(0.0, full_after), 0.0)

    def _needs_no_draw(self, held: _DrawnRequests, per_minute: int) -> bool:
        """Return whether the held requests decide: some are left, or the bucket is known to be
        still empty.
        """
        ago = self._clock() - held.drawn_at
        if held.left:
            return ago < _HELD_SECONDS
        return held.full_after - ago > MINUTE - MINUTE / per_minute

    async def _fill(self, held: _DrawnRequests, project_id: str, per_minute: int) -> None:
        wanted = max(1, per_minute // _PARTS) if self._shared else 1
        returned = held.left
        held.left = 0
        try:
            drawn = await self._draw(project_id, per_minute, wanted, returned)
        except (
            UnavailableError
        ):  # requests that read still work while nothing can be written: this server counts alone
            drawn = await self._draw_own(project_id, per_minute, 1, 0)
        held.left, held.full_after, held.drawn_at = drawn.taken, drawn.full_after, self._clock()

    async def _draw_own(
        self, project_id: str, per_minute: int, wanted: int, returned: int
    ) -> Drawn:
        if len(self._own) >= _MOST and project_id not in self._own:
            self._own.clear()
        now = self._clock()
        drawn = Drawn.of(
            max(0.0, self._own.get(project_id, now) - now), per_minute, wanted, returned
        )
        self._own[project_id] = now + drawn.full_after
        return drawn
