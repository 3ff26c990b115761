"""Jobs for their users: create, read and list them, cancel, pause and resume them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    String,
    and_,
    bindparam,
    cast,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from ft_service.errors import ConflictError, LimitError, NotFoundError, SpecError
from ft_service.jobs import decisions, user_actions
from ft_service.jobs.queue_snapshot import QueuedJob
from ft_service.jobs.reasons import OF_PAUSES, Reason
from ft_service.jobs.states import Job, State
from ft_service.jobs.time_left import WINDOW
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.documents import Desired
from ft_service.rundir.events import Metrics
from ft_service.store.database import StorePart, database_time
from ft_service.store.integrations import integration_rows
from ft_service.store.records import (
    Checkpoint,
    NewEvent,
    NewJob,
    Order,
    Page,
    Reported,
    StoredEvent,
)
from ft_service.store.rows import (
    CHECKPOINT,
    EVENT,
    JOB,
    Listing,
    changed_job_row,
    cursor,
    event_row,
    insert_events,
    new_job_row,
    not_found,
    page,
    to_checkpoint,
    to_event,
    to_job,
)
from ft_service.store.tables import (
    NEEDS_ATTENTION,
    UNFINISHED,
    WAITING,
    checkpoints,
    events,
    integrations,
    job_metadata,
    jobs,
    projects,
)
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.projects import lock_project, refuse_deleted
from ft_service.store.webhooks import announce
from ft_service.wording import counted

MAX_TRIES = 20
"""Limit of attempts to apply a request; each can fail only because the reconciler has written the
job meanwhile.
"""

_AT_ONCE = 500
_WITHOUT = {"": ""}
"""The metadata row of a job without metadata."""
ASKED = {
    Verb.CANCEL: "Cancel requested.",
    Verb.PAUSE: "Pause requested.",
    Verb.RESUME: "Resume requested.",
}


_THERE = jobs.c.deleted_at.is_(None)
_SELECT_JOB = select(*JOB).where(
    jobs.c.id == bindparam("job_id"), jobs.c.project_id == bindparam("of_project"), _THERE
)
_INSERT_EVENTS = insert(events)
_INSERT_JOB = insert(jobs).values(created_at=database_time()).returning(jobs.c.position, *JOB)
_MEASURED = (
    select(events.c.metrics, events.c.created_at)
    .where(events.c.job_id == bindparam("job_id"), events.c.metrics.is_not(None))
    .order_by(events.c.position.desc())
)
_SELECT_VALIDATED = _MEASURED.where(cast(events.c.metrics, String).like('%"valid_loss"%')).limit(1)
_SELECT_REPORTED = (
    select(
        events.c.position, events.c.attempt, events.c.created_at, events.c.message, events.c.metrics
    )
    .where(
        events.c.job_id == bindparam("job_id"),
        events.c.position > bindparam("position"),
        or_(events.c.metrics.is_not(None), events.c.message.in_(list(ASKED.values()))),
    )
    .order_by(events.c.position)
)
_SELECT_NEWEST = select(func.max(events.c.position)).where(events.c.job_id == bindparam("job_id"))


def _has_key(key: str) -> ColumnElement[bool]:
    """Condition: the job's metadata have this key."""
    pair = job_metadata.alias()
    return exists().where(pair.c.job_position == jobs.c.position, pair.c.key == key)


def _running_on(condition: ColumnElement[bool]) -> Select[Any]:
    """Jobs of all projects that run and are to run on.

    A running job needs attention, of which an index knows: without that every job that ever was
    would be read.
    """
    running = jobs.c.state == State.RUNNING.value, jobs.c.desired == Desired.RUN.value
    return select(*JOB).where(NEEDS_ATTENTION, *running, condition)


class JobStore(StorePart):
    """Jobs, with their events and checkpoints."""

    def create_jobs(self, new: Sequence[NewJob]) -> list[Job]:
        """Store new jobs with their first events, all or none; the database sets `created_at`.

        Raises ConflictError if an id is taken or the project does not exist, LimitError if too many
        jobs of a project would wait (`NewJob.max_queued`).
        """
        with self._database.writing() as connection:
            created = create(connection, new)
        self._database.changed.set()
        return created

    def refuse_more_waiting(self, new: Sequence[NewJob]) -> None:
        """Raise LimitError if too many jobs of a project would wait with these."""
        with self._database.reading() as connection:
            _refuse_more_waiting(connection, new)

    def get_job(self, project_id: str, job_id: str) -> Job:
        with self._database.reading() as connection:
            return read_job(connection, project_id, job_id)

    def job_of_organization(self, organization: str, job_id: str) -> Job | None:
        """A job of any project of an organization."""
        query = select(*JOB).join(projects, projects.c.id == jobs.c.project_id)
        query = query.where(jobs.c.id == job_id, projects.c.organization == organization, _THERE)
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        return None if row is None else to_job(row)

    def list_jobs(
        self,
        project_id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        metadata: dict[str, str] | Literal["none"] | None = None,
        states: Sequence[State] = (),
        base: str | None = None,
        metadata_key: str | None = None,
        suffix: str | None = None,
    ) -> Page[Job]:
        """A project's jobs, newest first.

        `metadata`: only jobs with all these pairs; "none": only jobs without metadata.
        `metadata_key`: only jobs that have this key. `states`: only jobs in one of them; none: in
        any. `suffix`: only jobs whose suffix or name contains it, in any case.
        """
        mine = jobs.c.project_id == project_id
        query = select(*JOB).where(mine, _THERE)
        for key, value in (_WITHOUT if metadata == "none" else metadata or {}).items():
            pair = job_metadata.alias()
            matches = (pair.c.project_id == project_id, pair.c.key == key, pair.c.value == value)
            query = query.join(pair, and_(pair.c.job_position == jobs.c.position, *matches))
        if metadata_key is not None:
            query = query.where(_has_key(metadata_key))
        if states:
            query = query.where(jobs.c.state.in_([state.value for state in states]))
        if base is not None:
            query = query.where(jobs.c.base == base)
        if suffix is not None:
            given = jobs.c.request["suffix"].as_string(), jobs.c.name
            query = query.where(or_(*(name.icontains(suffix, autoescape=True) for name in given)))
        with self._database.reading() as connection:
            query = Listing(jobs.c.position, jobs.c.id, [mine]).apply(connection, query, after)
            return page(connection, query, limit, to_job)

    def running_with(self, metadata_key: str) -> list[Job]:
        """Jobs of all projects that run and are to run on, and whose metadata have a key."""
        with self._database.reading() as connection:
            return [
                to_job(row)
                for row in connection.execute(_running_on(_has_key(metadata_key))).mappings()
            ]

    def running_that_sample(self) -> list[Job]:
        """Jobs of all projects that run and are to run on, and whose answers are sampled."""
        method = jobs.c.request["method"]
        own = method["distillation"]["answers"].as_string() == "student"
        samples = or_(
            method["type"].as_string() == "reinforcement",
            and_(method["type"].as_string() == "distillation", own),
        )
        with self._database.reading() as connection:
            return [to_job(row) for row in connection.execute(_running_on(samples)).mappings()]

    def request(
        self,
        project_id: str,
        job_id: str,
        verb: Verb,
        slots: int | None = None,
        *,
        succeeded: int | None = None,
        reason: Reason | None = None,
        max_cost: int | None = None,
    ) -> Job:
        """Apply `user_actions.request` by compare-and-set, with an event.

        Raises SpecError as it does, LimitError if one job too many would wait, ConflictError if the
        job keeps changing.
        """
        for _ in range(MAX_TRIES):
            with self._database.writing(makes_room=verb is not Verb.RESUME) as connection:
                old = read_job(connection, project_id, job_id)
                now = connection.scalars(select(database_time())).one()
                new = user_actions.request(
                    old,
                    verb,
                    now,
                    slots,
                    succeeded=succeeded,
                    reason=reason,
                    max_cost=max_cost,
                )
                if (
                    new.state is State.QUEUED
                    and old.state is State.PAUSED
                    and old.reason not in OF_PAUSES
                ):
                    limit = lock_project(connection, project_id).get("max_queued")
                    _refuse_waiting_beyond(connection, project_id, 1, limit)
                if new != old and not write_job(connection, old, new):
                    continue
                if new != old:
                    connection.execute(
                        _INSERT_EVENTS,
                        event_row(
                            NewEvent(level="info", message=reason.text if reason else ASKED[verb]),
                            old,
                            now,
                        ),
                    )
                    record(connection, project_id, f"job.{verb.value}", job_id)
                    if new.state is not old.state:
                        announce(connection, new)
                job = read_job(connection, project_id, job_id)
            self._database.changed.set()
            return job
        raise ConflictError(f"Job {job_id} keeps changing; try again.")

    def call(self, project_id: str, job_id: str, texts: Mapping[str, str | None]) -> Job:
        """Change `name` or `note` of a job, or both; None: it has none any more.

        Raises NotFoundError.
        """
        with self._database.writing(makes_room=True) as connection:
            job = read_job(connection, project_id, job_id)
            if any(getattr(job, name) != text for name, text in texts.items()):
                connection.execute(update(jobs).where(jobs.c.id == job_id).values(**texts))
                record(connection, project_id, "job.named", job_id)
            return read_job(connection, project_id, job_id)

    def pause_all(self) -> int:
        """Pause every job of every project that is to run, for maintenance. Return their number.

        Raises as `request`.
        """
        return self._request_all(jobs.c.desired == Desired.RUN.value, Verb.PAUSE)

    def resume_all(self) -> int:
        """Resume the jobs that `pause_all` has paused and nobody has touched since. Return their
        number. Raises as `request`.
        """
        return self._request_all(jobs.c.reason == Reason.MAINTENANCE.value, Verb.RESUME)

    def _request_all(self, which: ColumnElement[bool], verb: Verb) -> int:
        chosen = select(jobs.c.project_id, jobs.c.id).where(UNFINISHED, _THERE, which)
        with self._database.reading() as connection:
            found = [tuple(row) for row in connection.execute(chosen.order_by(jobs.c.position))]
        done = 0
        reason = Reason.MAINTENANCE if verb is Verb.PAUSE else None
        for project_id, job_id in found:
            with contextlib.suppress(NotFoundError, SpecError):  # it ended meanwhile
                self.request(project_id, job_id, verb, reason=reason)
                done += 1
        return done

    def preempt(self, head: QueuedJob, job_id: str) -> bool:
        """Stop a running job at a checkpoint so that `head` can start.

        False: it no longer runs, or already stops.
        """
        with self._database.writing() as connection:
            row = (
                connection.execute(select(*JOB).where(jobs.c.id == job_id)).mappings().one_or_none()
            )
            old = None if row is None else to_job(row)
            new = old and decisions.preempted_by(old, head)
            if old is None or new is None or new == old or not write_job(connection, old, new):
                return False
            now = connection.scalars(select(database_time())).one()
            event = NewEvent(level="warn", message=f"The job makes room. {new.pending}")
            connection.execute(_INSERT_EVENTS, event_row(event, old, now))
        self._database.changed.set()
        return True

    def list_events(
        self,
        project_id: str,
        job_id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
        messages: bool = False,
    ) -> Page[StoredEvent]:
        """A job's events in the order in which they were stored.

        `messages`: only those without metrics.
        """
        mine = events.c.job_id == job_id
        query = select(*EVENT).where(mine)
        if messages:
            query = query.where(events.c.metrics.is_(None))
        with self._database.reading() as connection:
            read_job(connection, project_id, job_id)
            listing = Listing(events.c.position, events.c.id, [mine], newest_first=order == "desc")
            query = listing.apply(connection, query, after)
            return page(connection, query, limit, to_event)

    def event_place(self, project_id: str, job_id: str, event_id: str | None) -> int:
        """Position of a job's event among all events; 0 for None.

        Raises NotFoundError, and SpecError for an id of another job.
        """
        with self._database.reading() as connection:
            read_job(connection, project_id, job_id)
            if event_id is None:
                return 0
            return cursor(
                connection,
                events.c.position,
                events.c.id == event_id,
                events.c.job_id == job_id,
                after=event_id,
            )

    def newest_event(self, job_id: str) -> int:
        """Position of a job's newest event; 0: it has none."""
        with self._database.reading() as connection:
            return connection.scalars(_SELECT_NEWEST, {"job_id": job_id}).one() or 0

    def events_after(self, job_id: str, position: int, limit: int) -> list[tuple[int, StoredEvent]]:
        """A job's events after a position, each with its own position."""
        place = events.c.position
        query = (
            select(place, *EVENT)
            .where(events.c.job_id == job_id, place > position)
            .order_by(place)
            .limit(limit)
        )
        with self._database.reading() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
        return [(row.pop("position"), to_event(row)) for row in rows]

    def add_events(self, job: Job, new: Sequence[NewEvent]) -> None:
        """Add events of the service itself to a job in any state."""
        with self._database.writing() as connection:
            insert_events(connection, job, new)

    def list_checkpoints(
        self,
        project_id: str,
        job_id: str,
        *,
        after: str | None = None,
        limit: int = 10,
        names: Collection[str] | None = None,
    ) -> Page[Checkpoint]:
        """A job's checkpoints, highest step first; where several attempts reached a step, only the
        newest attempt's. `names`: only these; None: all.
        """
        step = checkpoints.c.step
        newer = checkpoints.alias()
        redone = exists().where(
            newer.c.job_id == checkpoints.c.job_id,
            newer.c.step == step,
            newer.c.attempt > checkpoints.c.attempt,
        )
        mine = checkpoints.c.job_id == job_id
        query = select(*CHECKPOINT).where(mine)
        if names is not None:
            redone = redone.where(newer.c.name.in_(names))
            query = query.where(checkpoints.c.name.in_(names))
        with self._database.reading() as connection:
            read_job(connection, project_id, job_id)
            query = Listing(step, checkpoints.c.id, [mine]).apply(
                connection, query.where(~redone), after
            )
            return page(connection, query, limit, to_checkpoint)

    def jobs_by_id(self, job_ids: Sequence[str]) -> list[Job]:
        """Jobs of all projects by id; unknown ids, and those of deleted jobs, are left out."""
        found: list[Job] = []
        with self._database.reading() as connection:
            for start in range(0, len(job_ids), _AT_ONCE):
                query = select(*JOB).where(jobs.c.id.in_(job_ids[start : start + _AT_ONCE]), _THERE)
                found += [to_job(row) for row in connection.execute(query).mappings()]
        return found

    def ended_before(self, job_ids: Sequence[str], seconds: float) -> list[str]:
        """Of these ids those of jobs that ended at least so many seconds ago, and whose processes
        are gone.
        """
        query = select(jobs.c.id).where(jobs.c.id.in_(job_ids), jobs.c.phase.is_(None))
        with self._database.reading() as connection:
            return list(
                connection.scalars(query.where(jobs.c.finished_at <= database_time() - seconds))
            )

    def known_jobs(self, job_ids: Sequence[str]) -> set[str]:
        """Those of these ids that a job of any project has, or a deleted one that is not erased."""
        found: set[str] = set()
        with self._database.reading() as connection:
            for start in range(0, len(job_ids), _AT_ONCE):
                query = select(jobs.c.id).where(jobs.c.id.in_(job_ids[start : start + _AT_ONCE]))
                found.update(connection.scalars(query))
        return found

    def adapters_to_continue(self) -> list[tuple[str, str]]:
        """Job and path of each adapter that jobs of all projects continue from which are not over,
        or still stopping. Specs are not parsed: thousands of jobs may wait.
        """
        parent = jobs.c.spec["parent"]
        query = select(parent["job_id"].as_string(), parent["path"].as_string()).where(UNFINISHED)
        with self._database.reading() as connection:
            return [
                (job_id, path)
                for job_id, path in connection.execute(query).all()
                if job_id is not None
            ]

    def get_checkpoint(self, project_id: str, checkpoint_id: str) -> Checkpoint:
        query = select(*CHECKPOINT).where(
            checkpoints.c.id == checkpoint_id, checkpoints.c.project_id == project_id
        )
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            message = f"There is no checkpoint {checkpoint_id!r} in this project."
            raise NotFoundError(message, param="checkpoint_id", code="no_checkpoint")
        return to_checkpoint(row)

    def checkpoint_at(self, job_id: str, step: int) -> Checkpoint | None:
        """A job's checkpoint at a step, the newest attempt's; None if there is none."""
        mine = (checkpoints.c.job_id == job_id, checkpoints.c.step == step)
        query = select(*CHECKPOINT).where(*mine).order_by(checkpoints.c.attempt.desc()).limit(1)
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        return None if row is None else to_checkpoint(row)

    def latest_metrics(self, job_id: str) -> Metrics | None:
        """Metrics of the newest event with metrics; None if there is none."""
        return next((metrics for metrics, _ in self._measured(_MEASURED.limit(1), job_id)), None)

    def latest_steps(self, job_id: str) -> list[tuple[Metrics, float]]:
        """Metrics of a job's newest events, enough for its pace, and when each was stored; newest
        first.
        """
        # A checkpoint repeats its step's numbers.
        return self._measured(_MEASURED.limit(2 * WINDOW), job_id)

    def latest_validation(self, job_id: str) -> Metrics | None:
        """Metrics of the newest event of a step with a validation; None if there was none."""
        return next((metrics for metrics, _ in self._measured(_SELECT_VALIDATED, job_id)), None)

    def _measured(self, query: Select[Any, Any], job_id: str) -> list[tuple[Metrics, float]]:
        with self._database.reading() as connection:
            rows = connection.execute(query, {"job_id": job_id}).all()
        return [
            (Metrics.model_validate(row.metrics), row.created_at)
            for row in rows
            if row.metrics is not None
        ]

    def reported_since(self, job_id: str, position: int) -> list[Reported]:
        """A job's events with metrics, and those about user requests, stored after `position` (0:
        all).
        """
        with self._database.reading() as connection:
            rows = connection.execute(
                _SELECT_REPORTED, {"job_id": job_id, "position": position}
            ).all()
        return [Reported(*row) for row in rows]


def create(connection: Connection, new: Sequence[NewJob]) -> list[Job]:
    """Store jobs within a transaction. Returns them as stored. Raises LimitError."""
    created: list[Job] = []
    pairs: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = []
    integrated: list[dict[str, Any]] = []
    _refuse_more_waiting(connection, new)
    for one in new:
        row = dict(connection.execute(_INSERT_JOB, new_job_row(one.job)).mappings().one())
        position = row.pop("position")
        job = to_job(row)
        created.append(job)
        pairs += _pairs(job, position)
        events_of_job = (
            NewEvent(level="info", message=f"Created fine-tuning job: {job.id}"),
            *one.told,
        )
        first += [event_row(event, job, job.created_at) for event in events_of_job]
        integrated += integration_rows(job)
        if job.sweep_id is None:  # a sweep has one entry for its jobs
            record(connection, job.project_id, "job.created", job.id)
    for table, rows in ((job_metadata, pairs), (events, first), (integrations, integrated)):
        if rows:
            connection.execute(insert(table), rows)
    return created


def _refuse_more_waiting(connection: Connection, new: Sequence[NewJob]) -> None:
    """Raise LimitError for a project with a limit that these jobs would exceed, counted in the
    transaction that stores them, and NotFoundError for one that was deleted meanwhile.
    """
    for project_id in {one.job.project_id for one in new}:
        refuse_deleted(connection, project_id)
    limits = {one.job.project_id: one.max_queued for one in new if one.max_queued is not None}
    for project_id, limit in limits.items():
        lock_project(connection, project_id)
        _refuse_waiting_beyond(
            connection, project_id, sum(one.job.project_id == project_id for one in new), limit
        )


def _refuse_waiting_beyond(
    connection: Connection, project_id: str, more: int, limit: int | None
) -> None:
    """Raise LimitError if more jobs of a project would wait than may; its row is locked.

    `limit` None: any number may.
    """
    count = select(func.count()).where(jobs.c.project_id == project_id, UNFINISHED, WAITING)
    if limit is not None and (waiting := connection.scalars(count).one()) + more > limit:
        wait = "waits" if waiting == 1 else "wait"
        raise LimitError(
            f"{counted(waiting, 'job')} of this project {wait}, and {limit} may (its limit "
            "max_queued). Wait until one has "
            "started, or cancel one.",
            code="queue_limit",
        )


def read_job(connection: Connection, project_id: str, job_id: str) -> Job:
    """A project's job that is not deleted. Raises NotFoundError."""
    row = (
        connection.execute(_SELECT_JOB, {"job_id": job_id, "of_project": project_id})
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise not_found("fine-tuning job", job_id)
    return to_job(row)


def write_job(connection: Connection, old: Job, new: Job) -> bool:
    """Write a job unless it was written since `old` was read."""
    # looked_at = 0: the reconciler sees the change at once, not only when the job's turn comes
    # round.
    statement = update(jobs).where(jobs.c.id == old.id, jobs.c.version == old.version)
    return (
        connection.execute(statement.values(**changed_job_row(old, new), looked_at=0.0)).rowcount
        == 1
    )


def _pairs(job: Job, position: int) -> list[dict[str, Any]]:
    given = job.request.get("metadata")
    pairs = _WITHOUT if given is None else given
    mine = {"job_position": position, "project_id": job.project_id}
    return [{**mine, "key": key, "value": value} for key, value in pairs.items()]
