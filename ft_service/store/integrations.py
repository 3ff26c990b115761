"""Integrations of jobs: rows are created with their job, and claimed by the process that sends the
job's metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, exists, or_, select, update

from ft_service.jobs.states import Job, State
from ft_service.rundir.events import Metrics
from ft_service.store.database import StorePart, database_time, is_over
from ft_service.store.records import JobIntegration, NewEvent
from ft_service.store.rows import JOB, columns_of, insert_events, to_job, to_metrics
from ft_service.store.tables import UNDELIVERED, events, integrations, jobs

WRITTEN_BY_JOBS = ("tensorboard",)
"""Types that the job itself writes."""
INTEGRATION = columns_of(JobIntegration, integrations)
LONGEST_SECONDS = 900.0
"""Longest time by which `lease_expires_at` and `next_try_at` lie ahead."""

_MINE = integrations.c
# Nothing is sent before a job's first attempt, or while it is paused.
_JOB_HAS_BEGUN = exists().where(
    jobs.c.id == _MINE.job_id,
    or_(
        and_(jobs.c.attempt > 0, jobs.c.state != State.PAUSED.value),
        jobs.c.finished_at.is_not(None),
    ),
)


class IntegrationStore(StorePart):
    """The table `integrations`."""

    def claim_integrations(self, owner: str, *, lease_seconds: float) -> list[JobIntegration]:
        """Claim integrations with metrics to send, and those of `owner` whose lease is half over,
        for `lease_seconds`.
        """
        half = database_time() + lease_seconds / 2
        free = or_(
            is_over(_MINE.lease_expires_at, LONGEST_SECONDS),
            and_(_MINE.owner == owner, _MINE.lease_expires_at <= half),
        )
        due = and_(UNDELIVERED, _JOB_HAS_BEGUN, free, is_over(_MINE.next_try_at, LONGEST_SECONDS))
        with (
            self._database.reading() as connection
        ):  # most searches find nothing, and need not wait for writers
            if connection.execute(select(_MINE.job_id).where(due).limit(1)).first() is None:
                return []
        claim = (
            update(integrations)
            .where(due)
            .values(owner=owner, lease_expires_at=database_time() + lease_seconds)
        )
        with self._database.writing() as connection:
            return [
                JobIntegration(**row)
                for row in connection.execute(claim.returning(*INTEGRATION)).mappings()
            ]

    def begin_integration(
        self, integration: JobIntegration, owner: str, url: str, new_events: Sequence[NewEvent]
    ) -> bool:
        """Store the run's URL and events after sending has begun.

        Return False if `owner` has lost its claim.
        """
        return self._settle(integration, owner, new_events, {"url": url})

    def end_integration(
        self,
        integration: JobIntegration,
        owner: str,
        new_events: Sequence[NewEvent] = (),
        *,
        error: str | None = None,
        retry_seconds: float | None = None,
    ) -> bool:
        """Store that sending has ended.

        `error`: message of a failure. `retry_seconds`: time until the next try; None: all was sent,
        or the service gives up. Return False and store nothing if `owner` has lost its claim.
        """
        values: dict[str, Any] = {"owner": None, "lease_expires_at": 0.0, "tries": 0}
        if error is not None:
            values |= {"error": error, "tries": integration.tries + 1}
        if retry_seconds is None:
            values["finished_at"] = database_time()
        else:
            values["next_try_at"] = database_time() + retry_seconds
        return self._settle(integration, owner, new_events, values)

    def release_integrations(self, owner: str) -> None:
        """End all claims of `owner`, so that other processes may continue at once."""
        with self._database.writing() as connection:
            connection.execute(
                update(integrations)
                .where(UNDELIVERED, _MINE.owner == owner)
                .values(owner=None, lease_expires_at=0.0)
            )

    def list_metrics(
        self, job_id: str, *, after: int, limit: int
    ) -> list[tuple[int, float, Metrics]]:
        """Return (position, time, metrics) of a job's steps stored after a position (0: all), in
        order of position.
        """
        place = events.c.position
        query = (
            select(place, events.c.created_at, events.c.metrics)
            .where(events.c.job_id == job_id, place > after, events.c.metrics.is_not(None))
            .order_by(place)
            .limit(limit)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return [
            (row.position, row.created_at, metrics)
            for row in rows
            if (metrics := to_metrics(row.metrics)) is not None
        ]

    def _settle(
        self,
        integration: JobIntegration,
        owner: str,
        new_events: Sequence[NewEvent],
        values: dict[str, Any],
    ) -> bool:
        mine = (_MINE.job_id == integration.job_id, _MINE.number == integration.number)
        statement = (
            update(integrations).where(*mine, UNDELIVERED, _MINE.owner == owner).values(**values)
        )
        with self._database.writing() as connection:
            if connection.execute(statement).rowcount != 1:
                return False
            if new_events:
                job = to_job(
                    connection.execute(select(*JOB).where(jobs.c.id == integration.job_id))
                    .mappings()
                    .one()
                )
                insert_events(connection, job, new_events)
            return True


def integration_rows(job: Job) -> list[dict[str, Any]]:
    """Return the rows for those integrations of a new job whose metrics the service sends."""
    return [
        {
            "job_id": job.id,
            "number": number,
            "project_id": job.project_id,
            "settings": settings,
            "tries": 0,
            "next_try_at": 0.0,
            "lease_expires_at": 0.0,
        }
        for number, settings in enumerate(job.request.get("integrations") or ())
        if settings["type"] not in WRITTEN_BY_JOBS
    ]
