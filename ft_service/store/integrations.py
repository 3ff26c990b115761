"""Integrations of jobs, and who sends what they ask for: rows are written with their job, claimed, and settled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, exists, insert, or_, select, update

from ft_service.jobs.states import Job, State
from ft_service.rundir.events import Metrics
from ft_service.store.database import Database, Direct, database_time, is_over
from ft_service.store.records import JobIntegration, NewEvent
from ft_service.store.rows import JOB, columns_of, event_row, to_job, to_metrics
from ft_service.store.tables import UNDELIVERED, events, integrations, jobs

WRITTEN_BY_JOBS = ("tensorboard",)
"""Types that the job itself sees to."""
INTEGRATION = columns_of(JobIntegration, integrations)
_NEW = ("job_id", "number", "project_id", "settings", "tries", "next_try_at", "lease_expires_at")
LONGEST_SECONDS = 900.0
"""How far `lease_expires_at` and `next_try_at` lie ahead at most."""
CREATE_INTEGRATIONS = Direct(insert(integrations), _NEW)

_MINE = integrations.c
# Nothing is to be done before a job's first attempt, nor while it is paused.
_BEGUN = exists().where(
    jobs.c.id == _MINE.job_id,
    or_(and_(jobs.c.attempt > 0, jobs.c.state != State.PAUSED.value), jobs.c.finished_at.is_not(None)),
)


class IntegrationStore(Database):
    """Integrations of jobs."""

    def has_undelivered(self) -> bool:
        """Whether any job with integrations has begun, and not all that it reported is there."""
        with self.reading() as connection:
            return bool(connection.scalars(select(select(_MINE.job_id).where(UNDELIVERED, _BEGUN).exists())).one())

    def claim_integrations(self, owner: str, *, lease_seconds: float) -> list[JobIntegration]:
        """Integrations with something to do that nobody else has, and those of `owner` whose lease is half over. Nobody else
        gets them for `lease_seconds`."""
        half = database_time() + lease_seconds / 2
        free = or_(is_over(_MINE.lease_expires_at, LONGEST_SECONDS), and_(_MINE.owner == owner, _MINE.lease_expires_at <= half))
        due = and_(UNDELIVERED, _BEGUN, free, is_over(_MINE.next_try_at, LONGEST_SECONDS))
        with self.reading() as connection:  # most looks find nothing, and need not wait for writers
            if connection.execute(select(_MINE.job_id).where(due).limit(1)).first() is None:
                return []
        claim = update(integrations).where(due).values(owner=owner, lease_expires_at=database_time() + lease_seconds)
        with self.writing() as connection:
            return [JobIntegration(**row) for row in connection.execute(claim.returning(*INTEGRATION)).mappings()]

    def begin_integration(self, integration: JobIntegration, owner: str, url: str, told: Sequence[NewEvent]) -> bool:
        """Sending has begun: where the run is, with events that say so. False if `owner` has it no longer."""
        return self._settle(integration, owner, told, {"url": url})

    def end_integration(
        self,
        integration: JobIntegration,
        owner: str,
        told: Sequence[NewEvent] = (),
        *,
        error: str | None = None,
        retry_seconds: float | None = None,
    ) -> bool:
        """Sending has ended. `error`: what went wrong; None: nothing. `retry_seconds`: until somebody may go on; None: there is
        nothing more to send, or it is given up. False, with nothing written, if `owner` has it no longer."""
        values: dict[str, Any] = {"owner": None, "lease_expires_at": 0.0, "tries": 0}
        if error is not None:
            values |= {"error": error, "tries": integration.tries + 1}
        if retry_seconds is None:
            values["finished_at"] = database_time()
        else:
            values["next_try_at"] = database_time() + retry_seconds
        return self._settle(integration, owner, told, values)

    def release_integrations(self, owner: str) -> None:
        """`owner` ends: others may go on at once."""
        with self.writing() as connection:
            connection.execute(
                update(integrations).where(UNDELIVERED, _MINE.owner == owner).values(owner=None, lease_expires_at=0.0)
            )

    def list_metrics(self, job_id: str, *, after: int, limit: int) -> list[tuple[int, float, Metrics]]:
        """(place, time, numbers) of a job's steps in the order in which they were stored, from after a place on (0: all)."""
        place = events.c.position
        query = (
            select(place, events.c.created_at, events.c.metrics)
            .where(events.c.job_id == job_id, place > after, events.c.metrics.is_not(None))
            .order_by(place)
            .limit(limit)
        )
        with self.reading() as connection:
            found = connection.execute(query).all()
        return [(row.position, row.created_at, metrics) for row in found if (metrics := to_metrics(row.metrics)) is not None]

    def _settle(self, integration: JobIntegration, owner: str, told: Sequence[NewEvent], values: dict[str, Any]) -> bool:
        mine = (_MINE.job_id == integration.job_id, _MINE.number == integration.number)
        statement = update(integrations).where(*mine, UNDELIVERED, _MINE.owner == owner).values(**values)
        with self.writing() as connection:
            if connection.execute(statement).rowcount != 1:
                return False
            if told:
                job = to_job(connection.execute(select(*JOB).where(jobs.c.id == integration.job_id)).mappings().one())
                now = connection.scalars(select(database_time())).one()
                connection.execute(insert(events), [event_row(event, job, now) for event in told])
            return True


def integration_rows(job: Job) -> list[dict[str, Any]]:
    """Rows for CREATE_INTEGRATIONS: one for each integration that a new job's create body asks the service for."""
    return [
        {
            "job_id": job.id,
            "number": number,
            "project_id": job.project_id,
            "settings": json.dumps(settings),
            "tries": 0,
            "next_try_at": 0.0,
            "lease_expires_at": 0.0,
        }
        for number, settings in enumerate(job.request.get("integrations") or ())
        if settings["type"] not in WRITTEN_BY_JOBS
    ]
