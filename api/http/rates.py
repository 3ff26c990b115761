"""How many requests a project sends: a bucket of as many as it may send in a minute, which fills again evenly.

One server keeps the bucket itself. Servers that share a PostgreSQL keep it there (ft_service/store/tenants/rates.py) and draw a
few requests at once, so that a project gets no more from several of them, and most requests wait for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from ft_service.errors import UnavailableError
from ft_service.store.sql import Store
from ft_service.store.tenants.rates import MINUTE, Drawn

_MOST = 10_000
"""Projects that are remembered at once."""
_PARTS = 50
"""Of what a project may send in a minute, a server draws one part at once: so much may lie unused at each."""
_HELD_SECONDS = 2.0
"""How long what was drawn may lie there. Then it goes back, with the next request."""

Draw = Callable[[str, int, int, int], Awaitable[Drawn]]
"""Of a project's bucket, by what it may send in a minute: so many requests, after so many were put back."""


@dataclass(frozen=True)
class Rate:
    """What a project has left."""

    limit: int
    remaining: int
    full_after: float
    """Seconds until it has all of `limit` again."""
    wait: float
    """Seconds until this request may be sent; 0: it may now."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's."""
        values = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.full_after:.3f}s",
        }
        return [(name.encode(), value.encode()) for name, value in values.items()]


@dataclass
class _Held:
    """What this server has drawn of a project's bucket."""

    left: int = 0
    full_after: float = 0.0
    """Of the bucket, in seconds, when it was last drawn from."""
    drawn_at: float = float("-inf")
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One request draws, and those that come meanwhile wait for that."""


class Rates:
    """Buckets of projects. For one event loop."""

    def __init__(self, draw: Draw | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`draw`: from buckets that several servers share; None: they are this one's alone."""
        self._clock = clock
        self._shared = draw is not None
        self._draw = draw or self._draw_own
        self._own: dict[str, float] = {}
        self._held: dict[str, _Held] = {}

    @classmethod
    def of(cls, store: Store) -> Rates:
        """By the store's buckets, where servers may share it."""

        async def draw(project_id: str, per_minute: int, wanted: int, returned: int) -> Drawn:
            return await run_in_threadpool(store.draw_requests, project_id, per_minute, wanted, returned)

        return cls(draw if store.is_shared else None)

    async def take(self, project_id: str, per_minute: int) -> Rate:
        """Count a request of a project's, if it may be sent."""
        if len(self._held) >= _MOST and project_id not in self._held:
            self._held.clear()
        held = self._held.setdefault(project_id, _Held())
        if not self._is_good(held, per_minute):
            async with held.turn:
                if not self._is_good(held, per_minute):
                    await self._fill(held, project_id, per_minute)
        each = MINUTE / per_minute
        full_after = max(0.0, held.full_after - (self._clock() - held.drawn_at))
        if held.left == 0:
            return Rate(per_minute, 0, full_after, max(full_after - MINUTE + each, 0.001))
        held.left -= 1
        full_after += held.left * -each
        remaining = min(per_minute - 1, int((MINUTE - full_after) / each + 1e-6))
        return Rate(per_minute, max(0, remaining), max(0.0, full_after), 0.0)

    def _is_good(self, held: _Held, per_minute: int) -> bool:
        """Whether nobody need be asked: there is some left, or it is known that there is none yet."""
        ago = self._clock() - held.drawn_at
        if held.left:
            return ago < _HELD_SECONDS
        return held.full_after - ago > MINUTE - MINUTE / per_minute

    async def _fill(self, held: _Held, project_id: str, per_minute: int) -> None:
        wanted = max(1, per_minute // _PARTS) if self._shared else 1
        returned, held.left = held.left, 0
        try:
            drawn = await self._draw(project_id, per_minute, wanted, returned)
        except UnavailableError:  # reading goes on where nothing can be written: for now this server counts alone
            drawn = await self._draw_own(project_id, per_minute, 1, 0)
        held.left, held.full_after, held.drawn_at = drawn.taken, drawn.full_after, self._clock()

    async def _draw_own(self, project_id: str, per_minute: int, wanted: int, returned: int) -> Drawn:
        if len(self._own) >= _MOST and project_id not in self._own:
            self._own.clear()
        now = self._clock()
        drawn = Drawn.of(max(0.0, self._own.get(project_id, now) - now), per_minute, wanted, returned)
        self._own[project_id] = now + drawn.full_after
        return drawn
