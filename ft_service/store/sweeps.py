"""Sweeps: for their users, and for the loop that moves them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, insert, select, update

from ft_service.errors import ConflictError, SpecError
from ft_service.jobs import decisions, user_actions
from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.jobs.user_actions import Verb
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.jobs import ASKED, MAX_TRIES, create, write_job
from ft_service.store.records import NewEvent, NewJob, NewSweep, Page, Sweep
from ft_service.store.rows import (
    JOB,
    Listing,
    columns_of,
    event_row,
    insert_events,
    not_found,
    page,
    to_job,
)
from ft_service.store.tables import UNFINISHED_SWEEP, deleted_models, events, jobs, sweeps
from ft_service.store.tenants.audit import record
from ft_service.store.webhooks import announce

_SWEEP = columns_of(Sweep, sweeps)
_NOW = select(database_time())


class _Changed(Exception):
    """Raised to roll back a change because one of the jobs was written meanwhile."""


class SweepStore(StorePart):
    """Sweeps, with their jobs."""

    def create_sweep(self, sweep: NewSweep, new: Sequence[NewJob]) -> list[Job]:
        """Store a sweep with all its jobs, as `create_jobs` does, or nothing. Raises the same."""
        with self._database.writing() as connection:
            connection.execute(insert(sweeps).values(**asdict(sweep), created_at=database_time()))
            created = create(connection, new)
            record(connection, sweep.project_id, "sweep.created", sweep.id, jobs=len(created))
        self._database.changed.set()
        return created

    def get_sweep(self, project_id: str, sweep_id: str) -> Sweep:
        with self._database.reading() as connection:
            return _get(connection, project_id, sweep_id)

    def list_sweeps(
        self, project_id: str, *, after: str | None = None, limit: int = 20
    ) -> Page[Sweep]:
        """A project's sweeps, newest first."""
        mine = (sweeps.c.project_id == project_id, sweeps.c.deleted_at.is_(None))
        with self._database.reading() as connection:
            query = Listing(sweeps.c.position, sweeps.c.id, mine).apply(
                connection, select(*_SWEEP).where(*mine), after
            )
            return page(connection, query, limit, lambda row: Sweep(**row))

    def unfinished_sweeps(self) -> list[Sweep]:
        """Unfinished sweeps of all projects, oldest first."""
        with self._database.reading() as connection:
            query = select(*_SWEEP).where(UNFINISHED_SWEEP).order_by(sweeps.c.position)
            return [Sweep(**row) for row in connection.execute(query).mappings()]

    def jobs_of_sweeps(self, sweep_ids: Collection[str]) -> dict[str, list[Job]]:
        """Sweep → its jobs in the order of their creation; not deleted ones."""
        found: dict[str, list[Job]] = {sweep_id: [] for sweep_id in sweep_ids}
        query = (
            select(*JOB)
            .where(jobs.c.sweep_id.in_(list(sweep_ids)), jobs.c.deleted_at.is_(None))
            .order_by(jobs.c.position)
        )
        with self._database.reading() as connection:
            for row in connection.execute(query).mappings():
                found[row["sweep_id"]].append(to_job(row))
        return found

    def stop_by_sweep(self, job_id: str, why: str) -> bool:
        """Stop a job that cannot become the best.

        False: it is over, stops already, or was changed meanwhile.
        """
        with self._database.writing() as connection:
            row = (
                connection.execute(select(*JOB).where(jobs.c.id == job_id)).mappings().one_or_none()
            )
            if row is None:
                return False
            old = to_job(row)
            now = connection.scalars(_NOW).one()
            new = decisions.stopped_by_sweep(old, why, now)
            if new == old or not write_job(connection, old, new):
                return False
            event = NewEvent(level="warn", message=f"{why[:1].upper()}{why[1:]}.")
            connection.execute(insert(events), event_row(event, old, now))
            if new.state is not old.state:
                announce(connection, new)
        self._database.changed.set()
        return True

    def finish_sweep(self, sweep: Sweep, best: Job | None, message: str) -> bool:
        """Mark a sweep as finished.

        `message`: event of its best job. False: it was marked before.
        """
        with self._database.writing() as connection:
            statement = update(sweeps).where(sweeps.c.id == sweep.id, UNFINISHED_SWEEP)
            values = {"finished_at": database_time(), "best_job": best and best.id}
            if connection.execute(statement.values(**values)).rowcount == 0:
                return False
            if best is not None:
                insert_events(connection, best, [NewEvent(level="info", message=message)])
        return True

    def cancel_sweep(
        self, project_id: str, sweep_id: str, succeeded: Mapping[str, int] | None = None
    ) -> Sweep:
        """Cancel all unfinished jobs of a sweep, all or none.

        Repeating it changes nothing. `succeeded`: job → attempt of jobs that have left their result
        and are not cancelled.

        Raises SpecError if all jobs are over, ConflictError if they keep changing.
        """
        for _ in range(MAX_TRIES):
            try:
                with self._database.writing(makes_room=True) as connection:
                    _cancel(connection, _get(connection, project_id, sweep_id), succeeded or {})
                    return _get(connection, project_id, sweep_id)
            except _Changed:
                continue
            finally:
                self._database.changed.set()
        raise ConflictError(f"Jobs of sweep {sweep_id} keep changing; try again.")

    def delete_sweep(self, project_id: str, sweep_id: str, *, keep_best: bool) -> None:
        """Hide a sweep and delete the tuned models of its jobs; `keep_best`: except the best one's.

        Raises SpecError while a job is not over, and for `keep_best` if there are models, and none
        is the best; ConflictError until the best job is named.
        """
        with self._database.writing(makes_room=True) as connection:
            sweep = _get(connection, project_id, sweep_id)
            members = _jobs(connection, sweep)
            left = sum(job.state not in TERMINAL for job in members)
            if left:
                message = (
                    f"Sweep {sweep_id} is not over: {left} of its {len(members)} jobs are "
                    "not. Cancel it first, or wait."
                )
                raise SpecError(message, code="invalid_state")
            if sweep.finished_at is None:
                raise ConflictError(f"Sweep {sweep_id} is about to name its best job; try again.")
            succeeded = [job for job in members if job.state is State.SUCCEEDED]
            if keep_best and sweep.best_job is None and succeeded:
                message = (
                    f"Sweep {sweep_id} has no best job, since none that succeeded has a "
                    "validation loss: nothing was removed. "
                    f"Leave out keep_best to remove the tuned models of all {len(succeeded)} jobs "
                    "that succeeded."
                )
                raise SpecError(message, param="keep_best", code="invalid_state")
            for job in succeeded:
                if not (keep_best and job.id == sweep.best_job):
                    row = {
                        "model": str(job.tuned_name),
                        "project_id": project_id,
                        "deleted_at": database_time(),
                    }
                    connection.execute(
                        upsert(connection, deleted_models).values(row).on_conflict_do_nothing()
                    )
            connection.execute(
                update(sweeps).where(sweeps.c.id == sweep_id).values(deleted_at=database_time())
            )
            record(connection, project_id, "sweep.deleted", sweep_id, keep_best=keep_best)


def _get(connection: Connection, project_id: str, sweep_id: str) -> Sweep:
    mine = (
        sweeps.c.id == sweep_id,
        sweeps.c.project_id == project_id,
        sweeps.c.deleted_at.is_(None),
    )
    row = connection.execute(select(*_SWEEP).where(*mine)).mappings().one_or_none()
    if row is None:
        raise not_found("sweep", sweep_id)
    return Sweep(**row)


def _jobs(connection: Connection, sweep: Sweep) -> list[Job]:
    query = (
        select(*JOB)
        .where(jobs.c.sweep_id == sweep.id, jobs.c.deleted_at.is_(None))
        .order_by(jobs.c.position)
    )
    return [to_job(row) for row in connection.execute(query).mappings()]


def _cancel(connection: Connection, sweep: Sweep, succeeded: Mapping[str, int]) -> None:
    """Raises _Changed."""
    now = connection.scalars(_NOW).one()
    left = [
        job
        for job in _jobs(connection, sweep)
        if job.state not in TERMINAL and succeeded.get(job.id) != job.attempt
    ]
    if not left:
        if sweep.cancelled_at is not None:
            return
        raise SpecError(
            f"Sweep {sweep.id} is over: there is nothing to cancel.", code="invalid_state"
        )
    for old in left:
        new = user_actions.request(old, Verb.CANCEL, now)
        if not write_job(connection, old, new):
            raise _Changed
        event = NewEvent(level="info", message=f"{ASKED[Verb.CANCEL]} Its sweep was cancelled.")
        connection.execute(insert(events), event_row(event, old, now))
        announce(connection, new)
    connection.execute(update(sweeps).where(sweeps.c.id == sweep.id).values(cancelled_at=now))
    record(connection, sweep.project_id, "sweep.cancelled", sweep.id, jobs=len(left))
