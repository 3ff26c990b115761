"""Deletion of jobs and projects, and of records by age: a mark hides them at once, then their rows
go in small transactions, each of which may be repeated after a kill. What lies on the disk goes
before the row that names it (control/cleanup/erasing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from ft_service.errors import SpecError
from ft_service.jobs.states import TERMINAL, State
from ft_service.spec import TunedName
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.jobs import read_job
from ft_service.store.rows import not_found
from ft_service.store.tables import (
    DELETED,
    ENDED,
    ERASED,
    UNDELIVERED,
    UNFINISHED,
    UNFINISHED_SWEEP,
    UNTRIMMED,
    VISIBLE,
    audit,
    chat_metadata,
    checkpoints,
    deleted_models,
    engines,
    eval_items,
    eval_runs,
    evals,
    events,
    files,
    integrations,
    job_metadata,
    jobs,
    keys,
    permissions,
    projects,
    request_rates,
    sessions,
    slots,
    stored_chats,
    sweeps,
    tinker_samplers,
    tinker_samples,
    tinker_sessions,
    upload_parts,
    uploads,
    usage,
    webhook_deliveries,
    webhook_endpoints,
)
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.projects import MANAGING_PROJECT
from ft_service.store.tenants.usage import AMOUNTS

AT_ONCE = 500
"""Rows that a transaction removes at most: on SQLite it keeps other writers waiting."""
SETTLE_SECONDS = 60.0
"""Time for which a deleted project is looked at again: a request that came before may still store
something.
"""
PROJECT_DELETED = "project.deleted"
"""The entry of the audit log that stays of a project."""
_JOBS_AT_ONCE = 50
_IN_SWEEP = exists().where(sweeps.c.id == jobs.c.sweep_id, UNFINISHED_SWEEP)
"""Its sweep still compares it with others."""
_OVER = and_(ENDED, jobs.c.phase.is_(None), ~_IN_SWEEP)
_OF_JOB = (events, checkpoints, integrations)
_OF_PROJECT = (
    *(webhook_deliveries, webhook_endpoints, sweeps, sessions, keys, upload_parts, uploads),
    *(tinker_samples, tinker_samplers, tinker_sessions, request_rates),
    *(chat_metadata, stored_chats),
    *(eval_items, eval_runs, evals),
)
"""Tables of which a project's rows go first, each after those that refer to it.

Its jobs, files and engines leave files.
"""


@dataclass(frozen=True)
class DeletedJob:
    """A job that is hidden and not erased."""

    position: int
    id: str
    project_id: str
    model: TunedName | None
    """Name of its tuned model; None: it has no readable one."""


class ErasureStore(StorePart):
    """Jobs and projects that are to go, and records that are too old."""

    def delete_job(self, project_id: str, job_id: str) -> list[str]:
        """Hide a job that is over, its tuned models and its file of metrics, for good.

        Returns the names of the models.

        Raises NotFoundError if it is deleted already, SpecError while it is not over, or its sweep
        is not.
        """
        with self._database.writing(makes_room=True) as connection:
            job = read_job(connection, project_id, job_id)
            if job.state not in TERMINAL:
                text = (
                    f"Job {job_id} is {job.state.value}: only a job that is over can be "
                    "deleted. Cancel it first."
                )
                raise SpecError(text, param="job_id", code="invalid_state")
            if job.phase is not None:
                text = f"Processes of job {job_id} still stop: delete it once its phase is null."
                raise SpecError(text, param="job_id", code="invalid_state")
            if connection.scalars(select(_IN_SWEEP).where(jobs.c.id == job_id)).one():
                text = (
                    f"Job {job_id} is one of sweep {job.sweep_id}, which is not over: cancel "
                    "the sweep first, or wait."
                )
                raise SpecError(text, param="job_id", code="invalid_state")
            name = job.tuned_name
            steps = connection.scalars(
                select(checkpoints.c.step).where(checkpoints.c.job_id == job_id).distinct()
            )
            models = [str(name)] if job.state is State.SUCCEEDED else []
            models += [str(name.at(step)) for step in sorted(steps)]
            if not _hide(connection, jobs.c.id == job_id):
                raise not_found("fine-tuning job", job_id)
            record(connection, project_id, "job.deleted", job_id, models=len(models))
        return models

    def hide_old_jobs(self, seconds: float) -> int:
        """Hide some of the jobs that ended at least so many seconds ago, as `delete_job` does.

        Returns how many.
        """
        with self._database.writing(makes_room=True) as connection:
            return _hide(connection, jobs.c.finished_at <= database_time() - seconds)

    def hide_jobs_of(self, project_id: str) -> int:
        """Hide some of a project's jobs that are over. Returns how many."""
        with self._database.writing(makes_room=True) as connection:
            return _hide(connection, jobs.c.project_id == project_id)

    def unfinished_jobs_of(self, project_id: str) -> list[str]:
        """Some of a project's jobs that are neither over nor stopping."""
        mine = (
            UNFINISHED,
            jobs.c.project_id == project_id,
            jobs.c.state.not_in([state.value for state in TERMINAL]),
        )
        with self._database.reading() as connection:
            return list(connection.scalars(select(jobs.c.id).where(*mine).limit(_JOBS_AT_ONCE)))

    def deleted_jobs(self, after: int, limit: int) -> list[DeletedJob]:
        """Hidden jobs of all projects from the position `after` on, but for those that have started
        an engine which still holds slots.
        """
        name = jobs.c.spec["tuned_name"].as_string()
        query = select(jobs.c.position, jobs.c.id, jobs.c.project_id, name).where(
            DELETED, jobs.c.position > after
        )
        query = (
            query.where(~exists().where(slots.c.job_id == jobs.c.id))
            .order_by(jobs.c.position)
            .limit(limit)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return [
            DeletedJob(position, job_id, project_id, _name(model))
            for position, job_id, project_id, model in rows
        ]

    def erase_job(self, job: DeletedJob) -> bool:
        """Remove some of a hidden job's rows. False: the last are removed, its own among them."""
        with self._database.writing(makes_room=True) as connection:
            for table in _OF_JOB:
                if table is checkpoints and job.model is not None:
                    _forget_checkpoints(connection, job.id, job.model)
                if _remove(connection, table, table.c.job_id == job.id) == AT_ONCE:
                    return True
            connection.execute(
                delete(job_metadata).where(job_metadata.c.job_position == job.position)
            )
            connection.execute(delete(jobs).where(jobs.c.position == job.position, DELETED))
            if job.model is not None:
                mine = deleted_models.c.model == str(job.model)
                connection.execute(
                    update(deleted_models).where(mine).values(erased_at=database_time())
                )
                connection.execute(delete(permissions).where(permissions.c.model == str(job.model)))
        return False

    def trim_events(self, seconds: float) -> bool:
        """Remove some events of jobs that ended at least so many seconds ago.

        False: none is left.
        """
        old = UNTRIMMED, jobs.c.finished_at <= database_time() - seconds, jobs.c.phase.is_(None)
        query = select(jobs.c.id).where(*old).order_by(jobs.c.finished_at).limit(_JOBS_AT_ONCE)
        with (
            self._database.reading() as connection
        ):  # most looks find nothing, and need not wait for writers
            ids = connection.scalars(query).all()
        if ids:
            with self._database.writing(makes_room=True) as connection:
                if _remove(connection, events, events.c.job_id.in_(ids)) < AT_ONCE:
                    connection.execute(
                        update(jobs).where(jobs.c.id.in_(ids)).values(trimmed_at=database_time())
                    )
        return bool(ids)

    def forget_models(self, seconds: float) -> None:
        """Remove the names of models whose jobs were erased so long ago."""
        with self._database.writing(makes_room=True) as connection:
            _remove(
                connection,
                deleted_models,
                and_(ERASED, deleted_models.c.erased_at <= database_time() - seconds),
            )

    def delete_project(self, project_id: str) -> None:
        """Hide a project for good, and make its keys invalid.

        What it has is then to be removed, `erase_project` last.

        Raises NotFoundError if it is deleted already, SpecError for the one that manages the
        others.
        """
        if project_id == MANAGING_PROJECT:
            raise SpecError(
                f"{project_id}: the project that manages the others cannot be deleted.",
                param="project_id",
            )
        now = database_time()
        values = {"deleted_at": now, "archived_at": func.coalesce(projects.c.archived_at, now)}
        with self._database.writing(makes_room=True) as connection:
            is_there = projects.c.id == project_id, projects.c.deleted_at.is_(None)
            if connection.execute(update(projects).where(*is_there).values(**values)).rowcount == 0:
                raise not_found("project", project_id)
            record(connection, project_id, PROJECT_DELETED, project_id)

    def projects_to_erase(self) -> list[str]:
        """Deleted projects of which something may be left."""
        left = projects.c.deleted_at.is_not(None), projects.c.erased_at.is_(None)
        with self._database.reading() as connection:
            return list(
                connection.scalars(
                    select(projects.c.id).where(*left).order_by(projects.c.deleted_at)
                )
            )

    def ended_engines_of(self, project_id: str) -> list[str]:
        """Engines of a project that hold no slots any more."""
        mine = engines.c.project_id == project_id, engines.c.ended_at.is_not(None)
        with self._database.reading() as connection:
            return list(connection.scalars(select(engines.c.id).where(*mine).limit(AT_ONCE)))

    def forget_engine(self, engine_id: str) -> None:
        """Remove the row of an engine that has ended, and whose directory is gone."""
        with self._database.writing(makes_room=True) as connection:
            connection.execute(
                delete(engines).where(engines.c.id == engine_id, engines.c.ended_at.is_not(None))
            )

    def erase_project(self, project_id: str) -> bool:
        """Remove some of a deleted project's rows, or hide some of its files.

        False: nothing is left that can go now.

        What stays are its use by day, without the keys, one entry of the audit log, and its row,
        without name and limits.
        """
        with self._database.writing(makes_room=True) as connection:
            for table in _OF_PROJECT:
                if _remove(connection, table, table.c.project_id == project_id):
                    return True
            if _remove(
                connection,
                permissions,
                or_(*(permissions.c[of] == project_id for of in ("project_id", "grantee"))),
            ):
                return True
            some = (
                select(files.c.position)
                .where(files.c.project_id == project_id, VISIBLE)
                .limit(AT_ONCE)
            )
            hidden = (
                update(files).where(files.c.position.in_(some)).values(deleted_at=database_time())
            )
            if connection.execute(hidden).rowcount:
                return True
            if _remove(
                connection,
                files,
                and_(files.c.project_id == project_id, files.c.freed_at.is_not(None)),
            ):
                return True
            old = projects.c.deleted_at <= database_time() - SETTLE_SECONDS
            is_old = connection.scalars(select(old).where(projects.c.id == project_id)).one()
            if not is_old or _has_any(connection, project_id, (jobs, files, engines)):
                return False
            if _remove(
                connection,
                audit,
                and_(audit.c.project_id == project_id, audit.c.type != PROJECT_DELETED),
            ):
                return True
            _sum_up_usage(connection, project_id)
            empty = {"erased_at": database_time(), "name": None, "limits": None, "max_slots": None}
            connection.execute(update(projects).where(projects.c.id == project_id).values(**empty))
        return False


def _hide(connection: Connection, which: ColumnElement[bool]) -> int:
    """Hide up to AT_ONCE jobs that are over."""
    some = select(jobs.c.position).where(_OVER, which).limit(AT_ONCE)
    hidden = update(jobs).where(jobs.c.position.in_(some), jobs.c.deleted_at.is_(None))
    hidden = hidden.values(deleted_at=database_time(), version=jobs.c.version + 1)
    columns = (
        jobs.c.id,
        jobs.c.project_id,
        jobs.c.state,
        jobs.c.result_file,
        jobs.c.spec["tuned_name"].as_string().label("model"),
    )
    rows = connection.execute(hidden.returning(*columns)).all()
    models = [
        {"model": row.model, "project_id": row.project_id, "deleted_at": database_time()}
        for row in rows
        if row.state == State.SUCCEEDED.value and row.model is not None
    ]
    for model in models:  # by which inference servers are told to unload it
        connection.execute(
            upsert(connection, deleted_models).values(model).on_conflict_do_nothing()
        )
    ids = [row.id for row in rows]
    results = [row.result_file for row in rows if row.result_file is not None]
    now = database_time()
    connection.execute(update(files).where(files.c.id.in_(results), VISIBLE).values(deleted_at=now))
    connection.execute(
        update(integrations)
        .where(integrations.c.job_id.in_(ids), UNDELIVERED)
        .values(finished_at=now)
    )
    connection.execute(update(sweeps).where(sweeps.c.best_job.in_(ids)).values(best_job=None))
    return len(rows)


def _remove(connection: Connection, table: Table, which: ColumnElement[bool]) -> int:
    """Remove up to AT_ONCE rows. Returns how many."""
    key = list(table.primary_key)
    some = select(*key).where(which).limit(AT_ONCE)
    place = key[0] if len(key) == 1 else tuple_(*key)
    return connection.execute(delete(table).where(place.in_(some))).rowcount


def _forget_checkpoints(connection: Connection, job_id: str, model: TunedName) -> None:
    """Remove what is kept by the names of a job's checkpoints."""
    steps = connection.scalars(
        select(checkpoints.c.step).where(checkpoints.c.job_id == job_id).distinct()
    )
    names = [str(model.at(step)) for step in steps]
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        connection.execute(delete(deleted_models).where(deleted_models.c.model.in_(some)))
        connection.execute(delete(permissions).where(permissions.c.model.in_(some)))


def _name(model: str | None) -> TunedName | None:
    try:
        return None if model is None else TunedName.parse(model)
    except ValueError:
        return None


def _has_any(connection: Connection, project_id: str, tables: Sequence[Table]) -> bool:
    return any(
        connection.scalars(select(exists().where(table.c.project_id == project_id))).one()
        for table in tables
    )


def _sum_up_usage(connection: Connection, project_id: str) -> None:
    """Replace a project's use by day and key by that of its days."""
    mine = usage.c.project_id == project_id
    sums = [func.sum(usage.c[name]).label(name) for name in AMOUNTS]
    days = (
        connection.execute(select(usage.c.day, *sums).where(mine).group_by(usage.c.day))
        .mappings()
        .all()
    )
    connection.execute(delete(usage).where(mine))
    if days:
        connection.execute(
            insert(usage), [{"project_id": project_id, "key_id": "", **day} for day in days]
        )
