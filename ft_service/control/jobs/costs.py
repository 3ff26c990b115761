"""What jobs have cost until now, for every place that shows it."""

from __future__ import annotations

from collections.abc import Sequence

from ft_service.jobs.states import Job
from ft_service.store.sql import Store


def costs_of(store: Store, jobs: Sequence[Job]) -> dict[str, int]:
    """Job → its cost until now, in millionths of its currency, of jobs of one project."""
    live = [job for job in jobs if job.taken_at is not None and job.price is not None]
    if not live:
        return {job.id: job.cost for job in jobs}
    now = store.now()
    seats: dict[str, float] = {}
    if any(job.engine_id is not None for job in live):
        engines = store.engines.live_engines(project_id=live[0].project_id)
        seats = {seat.id: seat.slot_seconds for engine in engines for seat in engine.seats}
    return {job.id: job.cost_at(now, seats.get(job.id, 0.0)) for job in jobs}
