"""Sweeps as their users see them, and what their keeper writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, insert, select, update

from ft_service.errors import ConflictError, SpecError
from ft_service.jobs import decisions, verbs
from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.jobs.verbs import Verb
from ft_service.store.database import Database, database_time, upsert
from ft_service.store.jobs import ASKED, MAX_TRIES, as_stored, create, write_job
from ft_service.store.records import NewEvent, NewJob, Page
from ft_service.store.rows import JOB, columns_of, cursor, event_row, not_found, page, to_job
from ft_service.store.sweeps.records import CREATE_SWEEP, NewSweep, Sweep
from ft_service.store.sweeps.tables import UNFINISHED_SWEEP, sweeps
from ft_service.store.tables import deleted_models, events, jobs
from ft_service.store.tenants.audit import record
from ft_service.store.webhooks import announce

_SWEEP = columns_of(Sweep, sweeps)
_NOW = select(database_time())


class _Changed(Exception):
    """Somebody else has written one of the jobs: undoes the transaction."""


class SweepStore(Database):
    """Sweeps, with their jobs."""

    def create_sweep(self, sweep: NewSweep, new: Sequence[NewJob]) -> list[Job]:
        """Store a sweep with all its jobs, as `create_jobs` does, or nothing. Raises the same."""
        given = [as_stored(one.job) for one in new]
        with self.driving(write=True) as driver:
            CREATE_SWEEP.run_all(driver, [sweep.row()])
            created = create(driver, new, given)
        self.stirred.set()
        return created

    def get_sweep(self, project_id: str, sweep_id: str) -> Sweep:
        with self.reading() as connection:
            return _get(connection, project_id, sweep_id)

    def list_sweeps(self, project_id: str, *, after: str | None = None, limit: int = 20) -> Page[Sweep]:
        """Newest first."""
        place, mine = sweeps.c.position, (sweeps.c.project_id == project_id, sweeps.c.deleted_at.is_(None))
        query = select(*_SWEEP).where(*mine).order_by(place.desc())
        with self.reading() as connection:
            if after is not None:
                query = query.where(place < cursor(connection, place, sweeps.c.id == after, *mine, after=after))
            return page(connection, query, limit, lambda row: Sweep(**row))

    def unfinished_sweeps(self) -> list[Sweep]:
        """Of all projects, the oldest first."""
        with self.reading() as connection:
            query = select(*_SWEEP).where(UNFINISHED_SWEEP).order_by(sweeps.c.position)
            return [Sweep(**row) for row in connection.execute(query).mappings()]

    def jobs_of_sweeps(self, sweep_ids: Collection[str]) -> dict[str, list[Job]]:
        """Sweep → its jobs in the order of their creation."""
        found: dict[str, list[Job]] = {sweep_id: [] for sweep_id in sweep_ids}
        query = select(*JOB).where(jobs.c.sweep_id.in_(list(sweep_ids))).order_by(jobs.c.position)
        with self.reading() as connection:
            for row in connection.execute(query).mappings():
                found[row["sweep_id"]].append(to_job(row))
        return found

    def stop_by_sweep(self, job_id: str, why: str) -> bool:
        """Stop a job that has no hope. False: it is over, stops already, or has changed in this moment."""
        with self.writing() as connection:
            row = connection.execute(select(*JOB).where(jobs.c.id == job_id)).mappings().one_or_none()
            if row is None:
                return False
            old, now = to_job(row), connection.scalars(_NOW).one()
            new = decisions.stopped_by_sweep(old, why, now)
            if new == old or not write_job(connection, old, new):
                return False
            event = NewEvent(level="warn", message=f"{why[:1].upper()}{why[1:]}.")
            connection.execute(insert(events), event_row(event, old, now))
            if new.state is not old.state:
                announce(connection, new)
        self.stirred.set()
        return True

    def finish_sweep(self, sweep: Sweep, best: Job | None, told: str) -> bool:
        """Note that all jobs of a sweep are over. `told`: an event of the best one. False: that was noted before."""
        with self.writing() as connection:
            statement = update(sweeps).where(sweeps.c.id == sweep.id, UNFINISHED_SWEEP)
            values = {"finished_at": database_time(), "best_job": best and best.id}
            if connection.execute(statement.values(**values)).rowcount == 0:
                return False
            if best is not None:
                now = connection.scalars(_NOW).one()
                connection.execute(insert(events), event_row(NewEvent(level="info", message=told), best, now))
        return True

    def cancel_sweep(self, project_id: str, sweep_id: str, succeeded: Mapping[str, int] | None = None) -> Sweep:
        """Cancel all jobs of a sweep that are not over, all or none. Repeating it changes nothing. `succeeded`: job → attempt,
        of those that are known to have left their result: they are not cancelled.

        Raises SpecError if all of them are over.
        """
        for _ in range(MAX_TRIES):
            try:
                with self.writing(makes_room=True) as connection:
                    _cancel(connection, _get(connection, project_id, sweep_id), succeeded or {})
                    return _get(connection, project_id, sweep_id)
            except _Changed:
                continue
            finally:
                self.stirred.set()
        raise ConflictError(f"Jobs of sweep {sweep_id} keep changing; try again.")

    def delete_sweep(self, project_id: str, sweep_id: str, *, keep_best: bool) -> None:
        """Hide a sweep, and delete the tuned models of its jobs; `keep_best`: all but the best one's.

        Raises SpecError while one of its jobs is not over, ConflictError in the moment until its best one is named.
        """
        with self.writing(makes_room=True) as connection:
            sweep = _get(connection, project_id, sweep_id)
            members = _jobs(connection, sweep)
            left = sum(job.state not in TERMINAL for job in members)
            if left:
                message = f"Sweep {sweep_id} is not over: {left} of its {len(members)} jobs are not. Cancel it first, or wait."
                raise SpecError(message, code="invalid_state")
            if sweep.finished_at is None:
                raise ConflictError(f"Sweep {sweep_id} is about to name its best job; try again.")
            for job in members:
                if job.state is State.SUCCEEDED and not (keep_best and job.id == sweep.best_job):
                    row = {"model": str(job.tuned_name), "project_id": project_id, "deleted_at": database_time()}
                    connection.execute(upsert(connection, deleted_models).values(row).on_conflict_do_nothing())
            connection.execute(update(sweeps).where(sweeps.c.id == sweep_id).values(deleted_at=database_time()))
            record(connection, project_id, "sweep.deleted", sweep_id, keep_best=keep_best)


def _get(connection: Connection, project_id: str, sweep_id: str) -> Sweep:
    mine = (sweeps.c.id == sweep_id, sweeps.c.project_id == project_id, sweeps.c.deleted_at.is_(None))
    row = connection.execute(select(*_SWEEP).where(*mine)).mappings().one_or_none()
    if row is None:
        raise not_found("sweep", sweep_id)
    return Sweep(**row)


def _jobs(connection: Connection, sweep: Sweep) -> list[Job]:
    query = select(*JOB).where(jobs.c.sweep_id == sweep.id).order_by(jobs.c.position)
    return [to_job(row) for row in connection.execute(query).mappings()]


def _cancel(connection: Connection, sweep: Sweep, succeeded: Mapping[str, int]) -> None:
    """Raises _Changed."""
    now = connection.scalars(_NOW).one()
    left = [job for job in _jobs(connection, sweep) if job.state not in TERMINAL and succeeded.get(job.id) != job.attempt]
    if not left:
        if sweep.cancelled_at is not None:
            return
        raise SpecError(f"Sweep {sweep.id} is over: there is nothing to cancel.", code="invalid_state")
    for old in left:
        new = verbs.request(old, Verb.CANCEL, now)
        if not write_job(connection, old, new):
            raise _Changed
        event = NewEvent(level="info", message=f"{ASKED[Verb.CANCEL]} Its sweep was cancelled.")
        connection.execute(insert(events), event_row(event, old, now))
        announce(connection, new)
    connection.execute(update(sweeps).where(sweeps.c.id == sweep.id).values(cancelled_at=now))
    record(connection, sweep.project_id, "sweep.cancelled", sweep.id, jobs=len(left))
