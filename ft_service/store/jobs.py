"""Jobs as their users see them: create, read, list, and ask for something."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from sqlalchemy import Connection, String, and_, bindparam, cast, exists, func, insert, literal_column, or_, select, update

from ft_service.errors import ConflictError, LimitError, NotFoundError
from ft_service.jobs import decisions, verbs
from ft_service.jobs.line import Waiting
from ft_service.jobs.states import Job, State
from ft_service.jobs.time_left import WINDOW
from ft_service.jobs.verbs import Verb
from ft_service.rundir.events import Metrics
from ft_service.spec import StoredSpec
from ft_service.store.database import Database, Direct, Driver, database_time, storable_json, storable_text
from ft_service.store.integrations import CREATE_INTEGRATIONS, integration_rows
from ft_service.store.records import Checkpoint, NewEvent, NewJob, Order, Page, Reported, StoredEvent
from ft_service.store.rows import (
    CHECKPOINT,
    EVENT,
    JOB,
    changed_job_row,
    cursor,
    event_row,
    new_job_row,
    not_found,
    page,
    to_checkpoint,
    to_event,
    to_job,
    to_metrics,
)
from ft_service.store.tables import UNFINISHED, WAITING, checkpoints, events, job_metadata, jobs, projects
from ft_service.store.tenants.audit import record
from ft_service.store.webhooks import announce

MAX_TRIES = 20
"""Tries of a verb against writes of the reconciler, each of which it can lose only to a write that happened."""

_AT_ONCE = 500
_WITHOUT = {"": ""}
"""The pair of a job without metadata."""
ASKED = {Verb.CANCEL: "Cancel requested.", Verb.PAUSE: "Pause requested.", Verb.RESUME: "Resume requested."}


_NEW_JOB = [*(column.name for column in JOB if column.name != "created_at"), "base"]
_FIRST_EVENT = ("id", "project_id", "job_id", "created_at", "level", "message")

# Built once: to put such statements together takes longer than to run them.
_CREATE_JOB = Direct(insert(jobs).values(created_at=database_time()).returning(jobs.c.created_at, jobs.c.position), _NEW_JOB)
_CREATE_EVENTS = Direct(insert(events), _FIRST_EVENT)
_CREATE_PAIRS = Direct(insert(job_metadata), ("job_position", "project_id", "key", "value"))
_COUNT_WAITING = Direct(select(func.count()).where(jobs.c.project_id == bindparam("of_project"), UNFINISHED, WAITING))
_LOCK_PROJECT = Direct(select(projects.c.id).where(projects.c.id == bindparam("of_project")).with_for_update(key_share=True))
_SELECT_JOB = select(*JOB).where(jobs.c.id == bindparam("job_id"), jobs.c.project_id == bindparam("of_project"))
_INSERT_EVENTS = insert(events)
_MEASURED = (
    select(events.c.metrics)
    .where(events.c.job_id == bindparam("job_id"), events.c.metrics.is_not(None))
    .order_by(events.c.position.desc())
    .limit(literal_column("1"))
    .offset(literal_column("0"))  # else SQLite's dialect names one, as a value that nobody gives
)
_SELECT_LATEST = Direct(_MEASURED)
_SELECT_PACE = Direct(
    select(events.c.metrics, events.c.created_at)
    .where(events.c.job_id == bindparam("job_id"), events.c.metrics.is_not(None))
    .order_by(events.c.position.desc())
    .limit(literal_column(str(2 * WINDOW)))  # a checkpoint repeats its step's numbers
    .offset(literal_column("0"))
)
_SELECT_VALIDATED = Direct(_MEASURED.where(cast(events.c.metrics, String).like(literal_column("'%\"valid_loss\"%'"))))
_REPORTED = (
    select(events.c.position, events.c.attempt, events.c.created_at, events.c.message, events.c.metrics)
    .where(
        events.c.job_id == bindparam("job_id"),
        events.c.position > bindparam("position"),
        or_(events.c.metrics.is_not(None), events.c.message.in_([literal_column(f"'{text}'") for text in ASKED.values()])),
    )
    .order_by(events.c.position)
)
_SELECT_REPORTED = Direct(_REPORTED)
_SELECT_NEWEST = Direct(select(func.max(events.c.position)).where(events.c.job_id == bindparam("job_id")))


class JobStore(Database):
    """Jobs, with their events and checkpoints."""

    def create_jobs(self, new: Sequence[NewJob]) -> list[Job]:
        """Store new jobs, all or none; `created_at` is set by the database. Their first events and `told` are written too.

        Raises ConflictError if an id is taken or there is no such project, LimitError if more jobs of a project would wait than
        may (`NewJob.max_queued`).
        """
        given = [as_stored(one.job) for one in new]
        with self.driving(write=True) as driver:
            created = create(driver, new, given)
        self.stirred.set()
        return created

    def refuse_more_waiting(self, new: Sequence[NewJob]) -> None:
        """Raise LimitError if more jobs of a project would wait with these than may."""
        with self.driving(write=False) as driver:
            _refuse_more_waiting(driver, new)

    def get_job(self, project_id: str, job_id: str) -> Job:
        with self.reading() as connection:
            return _get(connection, project_id, job_id)

    def list_jobs(
        self,
        project_id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        metadata: dict[str, str] | Literal["none"] | None = None,
        state: State | None = None,
        base: str | None = None,
    ) -> Page[Job]:
        """Newest first. `metadata`: only jobs whose metadata hold all these pairs; "none": only jobs without any. `state`,
        `base`: only jobs in it, on it."""
        place = jobs.c.position
        query = select(*JOB).where(jobs.c.project_id == project_id).order_by(place.desc())
        for key, value in (_WITHOUT if metadata == "none" else metadata or {}).items():
            pair = job_metadata.alias()
            mine = (pair.c.project_id == project_id, pair.c.key == key, pair.c.value == value)
            query = query.join(pair, and_(pair.c.job_position == place, *mine))
        if state is not None:
            query = query.where(jobs.c.state == state.value)
        if base is not None:
            query = query.where(jobs.c.spec["model"]["name"].as_string() == base)
        with self.reading() as connection:
            if after is not None:
                query = query.where(
                    place < cursor(connection, place, jobs.c.id == after, jobs.c.project_id == project_id, after=after)
                )
            return page(connection, query, limit, to_job)

    def request(
        self, project_id: str, job_id: str, verb: Verb, slots: int | None = None, *, succeeded: int | None = None
    ) -> Job:
        """Apply `job.request` by compare-and-set, with an event that says so. Raises SpecError as `job.request` does."""
        job = self._request(project_id, job_id, verb, slots, succeeded)
        self.stirred.set()
        return job

    def _request(self, project_id: str, job_id: str, verb: Verb, slots: int | None, succeeded: int | None) -> Job:
        for _ in range(MAX_TRIES):
            with self.writing(makes_room=verb is not Verb.RESUME) as connection:
                old = _get(connection, project_id, job_id)
                now = connection.scalars(select(database_time())).one()
                new = verbs.request(old, verb, now, slots, succeeded=succeeded)
                if new == old:
                    return old
                if write_job(connection, old, new):
                    connection.execute(_INSERT_EVENTS, event_row(NewEvent(level="info", message=ASKED[verb]), old, now))
                    record(connection, project_id, f"job.{verb.value}", job_id)
                    if new.state is not old.state:
                        announce(connection, new)
                    return _get(connection, project_id, job_id)
        raise ConflictError(f"Job {job_id} keeps changing; try again.")

    def displace(self, head: Waiting, job_id: str) -> bool:
        """Have a running job make room for one that waits. False: it is not running any more, or stops already."""
        with self.writing() as connection:
            row = connection.execute(select(*JOB).where(jobs.c.id == job_id)).mappings().one_or_none()
            old = None if row is None else to_job(row)
            new = old and decisions.displaced_by(old, head)
            if old is None or new is None or new == old or not write_job(connection, old, new):
                return False
            now = connection.scalars(select(database_time())).one()
            event = NewEvent(level="warn", message=f"The job makes room. {new.pending}")
            connection.execute(_INSERT_EVENTS, event_row(event, old, now))
        self.stirred.set()
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
        """In the order in which they were stored; newest first by default. `messages`: only those without metrics."""
        place = events.c.position
        query = select(*EVENT).where(events.c.job_id == job_id).order_by(place.desc() if order == "desc" else place.asc())
        if messages:
            query = query.where(events.c.metrics.is_(None))
        with self.reading() as connection:
            _get(connection, project_id, job_id)
            if after is not None:
                last = cursor(connection, place, events.c.id == after, events.c.job_id == job_id, after=after)
                query = query.where(place < last if order == "desc" else place > last)
            return page(connection, query, limit, to_event)

    def event_place(self, project_id: str, job_id: str, event_id: str | None) -> int:
        """The place of a job's event among all events; None: before all. Raises NotFoundError, and SpecError for another id."""
        with self.reading() as connection:
            _get(connection, project_id, job_id)
            if event_id is None:
                return 0
            return cursor(connection, events.c.position, events.c.id == event_id, events.c.job_id == job_id, after=event_id)

    def newest_event(self, job_id: str) -> int:
        """The place of a job's newest event; 0: it has none."""
        with self.driving(write=False) as driver:
            rows = _SELECT_NEWEST.run(driver, {"job_id": job_id})
        return rows[0][0] or 0

    def events_after(self, job_id: str, position: int, limit: int) -> list[tuple[int, StoredEvent]]:
        """A job's events with their places, from behind a place on."""
        place = events.c.position
        query = select(place, *EVENT).where(events.c.job_id == job_id, place > position).order_by(place).limit(limit)
        with self.reading() as connection:
            found = [dict(row) for row in connection.execute(query).mappings()]
        return [(row.pop("position"), to_event(row)) for row in found]

    def list_checkpoints(
        self,
        project_id: str,
        job_id: str,
        *,
        after: str | None = None,
        limit: int = 10,
        names: Collection[str] | None = None,
    ) -> Page[Checkpoint]:
        """Newest (highest step) first; of a step that several attempts reached only the newest attempt's. `names`: only these;
        None: all."""
        step = checkpoints.c.step
        newer = checkpoints.alias()
        redone = exists().where(
            newer.c.job_id == checkpoints.c.job_id, newer.c.step == step, newer.c.attempt > checkpoints.c.attempt
        )
        query = select(*CHECKPOINT).where(checkpoints.c.job_id == job_id).order_by(step.desc())
        if names is not None:
            redone = redone.where(newer.c.name.in_(names))
            query = query.where(checkpoints.c.name.in_(names))
        query = query.where(~redone)
        with self.reading() as connection:
            _get(connection, project_id, job_id)
            if after is not None:
                query = query.where(
                    step < cursor(connection, step, checkpoints.c.id == after, checkpoints.c.job_id == job_id, after=after)
                )
            return page(connection, query, limit, to_checkpoint)

    def jobs_by_id(self, job_ids: Sequence[str]) -> list[Job]:
        """Jobs of all projects by id; ids that nobody has are left out."""
        found: list[Job] = []
        with self.reading() as connection:
            for start in range(0, len(job_ids), _AT_ONCE):
                query = select(*JOB).where(jobs.c.id.in_(job_ids[start : start + _AT_ONCE]))
                found += [to_job(row) for row in connection.execute(query).mappings()]
        return found

    def unfinished_jobs(self) -> list[Job]:
        """Jobs that are not over, or still stopping, of all projects."""
        with self.reading() as connection:
            return [to_job(row) for row in connection.execute(select(*JOB).where(UNFINISHED)).mappings()]

    def get_checkpoint(self, project_id: str, checkpoint_id: str) -> Checkpoint:
        query = select(*CHECKPOINT).where(checkpoints.c.id == checkpoint_id, checkpoints.c.project_id == project_id)
        with self.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            message = f"There is no checkpoint {checkpoint_id!r} in this project."
            raise NotFoundError(message, param="checkpoint_id", code="no_checkpoint")
        return to_checkpoint(row)

    def checkpoint_at(self, job_id: str, step: int) -> Checkpoint | None:
        """A job's checkpoint at a step, the newest attempt's; None if there is none."""
        mine = (checkpoints.c.job_id == job_id, checkpoints.c.step == step)
        query = select(*CHECKPOINT).where(*mine).order_by(checkpoints.c.attempt.desc()).limit(1)
        with self.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        return None if row is None else to_checkpoint(row)

    def latest_metrics(self, job_id: str) -> Metrics | None:
        """Metrics of the newest event that has any; None if none has."""
        return self._latest(_SELECT_LATEST, job_id)

    def latest_steps(self, job_id: str) -> list[tuple[Metrics, float]]:
        """Metrics of a job's newest events that have any, and when each was stored, the newest first: enough for its pace."""
        with self.driving(write=False) as driver:
            rows = _SELECT_PACE.run(driver, {"job_id": job_id})
        known = ((to_metrics(_loaded(metrics)), time) for metrics, time in rows)
        return [(metrics, time) for metrics, time in known if metrics is not None]

    def latest_validation(self, job_id: str) -> Metrics | None:
        """Metrics of the newest event of a step with a validation; None if there was none."""
        return self._latest(_SELECT_VALIDATED, job_id)

    def _latest(self, statement: Direct, job_id: str) -> Metrics | None:
        with self.driving(write=False) as driver:
            rows = statement.run(driver, {"job_id": job_id})
        return to_metrics(_loaded(rows[0][0])) if rows else None

    def reported_since(self, job_id: str, position: int) -> list[Reported]:
        """What a job's attempts reported of their steps, and the wishes of its users, stored after `position` (0: all)."""
        with self.driving(write=False) as driver:
            rows = _SELECT_REPORTED.run(driver, {"job_id": job_id, "position": position})
        return [
            Reported(position, attempt, time, message, _loaded(metrics)) for position, attempt, time, message, metrics in rows
        ]


def create(driver: Driver, new: Sequence[NewJob], given: Sequence[tuple[Job, dict[str, Any]]]) -> list[Job]:
    """Store jobs within a transaction. `given`: `as_stored` of each, made before it begins. Raises LimitError."""
    created: list[Job] = []
    pairs: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    _refuse_more_waiting(driver, new)
    for (job, row), one in zip(given, new, strict=True):
        [(created_at, position)] = _CREATE_JOB.run(driver, row)
        created.append(replace(job, created_at=created_at))
        pairs += _pairs(job, position)
        told += _first_events(created[-1], one.told)
        asked += integration_rows(job)
    _CREATE_PAIRS.run_all(driver, pairs)
    _CREATE_EVENTS.run_all(driver, told)
    if asked:
        CREATE_INTEGRATIONS.run_all(driver, asked)
    return created


def _refuse_more_waiting(driver: Driver, new: Sequence[NewJob]) -> None:
    """Count in the transaction that adds to the count; only for projects that have such a limit."""
    limits = {one.job.project_id: one.max_queued for one in new if one.max_queued is not None}
    for project_id, limit in limits.items():
        if driver.dialect.name == "postgresql":  # SQLite's writers exclude each other anyway
            _LOCK_PROJECT.run(driver, {"of_project": project_id})
        [(waiting,)] = _COUNT_WAITING.run(driver, {"of_project": project_id})
        more = sum(one.job.project_id == project_id for one in new)
        if waiting + more > limit:
            raise LimitError(
                f"{waiting} jobs of this project wait, and {limit} may (its limit max_queued). Wait until one has started, or "
                "cancel one.",
                code="queue_limit",
            )


def _loaded(value: Any) -> Any:
    """A JSON column's value: the driver of SQLite gives its text, PostgreSQL's what it means."""
    return json.loads(value) if isinstance(value, str) else value


def _get(connection: Connection, project_id: str, job_id: str) -> Job:
    row = connection.execute(_SELECT_JOB, {"job_id": job_id, "of_project": project_id}).mappings().one_or_none()
    if row is None:
        raise not_found("fine-tuning job", job_id)
    return to_job(row)


def write_job(connection: Connection, old: Job, new: Job) -> bool:
    """Write a job unless another has written it since `old` was read."""
    # Whoever reconciles next should see the wish at once, not only when the job's turn comes round.
    statement = update(jobs).where(jobs.c.id == old.id, jobs.c.version == old.version)
    return connection.execute(statement.values(**changed_job_row(old, new), looked_at=0.0)).rowcount == 1


_DOCUMENTS = ("request", "error", "sweep_values", "sweep_course")
"""Columns of JSON, beside the spec's."""


def as_stored(job: Job) -> tuple[Job, dict[str, Any]]:
    """A new job as it will be read, and its row as drivers take it."""
    spec, spec_text = storable_json(job.stored_spec.document)
    documents = {name: storable_json(getattr(job, name)) for name in _DOCUMENTS if getattr(job, name) is not None}
    changes: dict[str, Any] = {name: kept for name, (kept, _) in documents.items() if kept is not getattr(job, name)}
    if spec is not job.stored_spec.document:
        changes["stored_spec"] = StoredSpec(spec)
    job = replace(job, **changes) if changes else job
    return job, new_job_row(job) | {"spec": spec_text} | {name: text for name, (_, text) in documents.items()}


def _first_events(job: Job, told: Sequence[NewEvent]) -> list[dict[str, Any]]:
    first = NewEvent(level="info", message=f"Created fine-tuning job: {job.id}")
    rows = [event_row(event, job, job.created_at) for event in (first, *told)]
    return [{**row, "message": storable_text(row["message"])} for row in rows]


def _pairs(job: Job, position: int) -> list[dict[str, Any]]:
    given = job.request.get("metadata")
    pairs = _WITHOUT if given is None else given
    mine = {"job_position": position, "project_id": job.project_id}
    return [{**mine, "key": key, "value": value} for key, value in pairs.items()]
