"""`/v1/engines`: sets of ranks that train several of a project's jobs on one base."""

from __future__ import annotations

from typing import Literal

from api.http.auth import Caller
from api.http.dependencies import Svc
from api.http.routing import keyed_router
from api.wire.views import ListView, Seconds, View, list_view

router = keyed_router("/v1/engines", "engines")


class EngineJobView(View):
    id: str
    since: Seconds
    """When the engine began to train it."""
    slot_seconds: float
    """Its share of the time of the engine's slots until now."""


class EngineView(View):
    id: str
    object: Literal["engine"] = "engine"
    created_at: Seconds
    base: str | None
    """The base that its jobs train on; null: it has no job now."""
    ranks: int
    """Slots that it holds, however many jobs it trains."""
    most_jobs: int
    """Most jobs that it trains at once."""
    jobs: list[EngineJobView]
    """The jobs that it trains."""
    ending: bool
    """Whether it was asked to end: its jobs stop at a checkpoint and are queued again."""


@router.get("")
def list_engines(caller: Caller, services: Svc) -> ListView[EngineView]:
    """Not in OpenAI's API. List the project's engines that hold slots, the oldest first."""
    live = services.store.engines.live_engines(project_id=caller.project_id)
    views = [
        EngineView(
            id=engine.id,
            created_at=int(engine.created_at),
            base=engine.base,
            ranks=engine.ranks,
            most_jobs=engine.most_seats,
            jobs=[
                EngineJobView(
                    id=seat.id, since=int(seat.since), slot_seconds=round(seat.slot_seconds, 3)
                )
                for seat in engine.seats
            ],
            ending=engine.closing_at is not None,
        )
        for engine in live
    ]
    return list_view(views, has_more=False)
