"""Conversion between rows and records, and lists as pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, Table, insert, select

from ft_service.errors import NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.jobs.queue_snapshot import JobSize
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Halt, Job, Phase, State
from ft_service.rundir.documents import Desired
from ft_service.rundir.engine import SeatSize
from ft_service.rundir.events import Metrics
from ft_service.spec import StoredSpec
from ft_service.store.database import database_time
from ft_service.store.records import ApiKey, Checkpoint, File, Item, NewEvent, Page, StoredEvent
from ft_service.store.tables import checkpoints, events, files, jobs, keys


def columns_of(record: type, table: Table) -> list[ColumnElement[Any]]:
    """The columns with the names of a record's fields."""
    return [table.c[field.name] for field in fields(record)]


KEY = columns_of(ApiKey, keys)
FILE = columns_of(File, files)
JOB = [jobs.c.spec if field.name == "stored_spec" else jobs.c[field.name] for field in fields(Job)]
EVENT = columns_of(StoredEvent, events)
CHECKPOINT = columns_of(Checkpoint, checkpoints)

# A job's request never changes after its creation; its spec changes only where "auto" is replaced.
# Leases, the time of queueing and use are written elsewhere, and so is what its users call it.
_REQUEST = {
    "id",
    "project_id",
    "created_at",
    "request",
    "stored_spec",
    "max_seconds",
    "key_id",
    "sweep_id",
    "sweep_values",
}
_FIELDS = [field.name for field in fields(Job)]
_REASONS = {reason.value: reason for reason in Reason}
"""By value, so that a job is not hidden by a reason that a later version has added."""
_ENUMERATED = ("state", "phase", "desired", "halt", "reason")
_FIXED = _REQUEST | {
    "queued_at",
    "taken_at",
    "held_seconds",
    "slot_seconds",
    "cost",
    "name",
    "note",
}


def to_job(row: RowMapping | dict[str, Any]) -> Job:
    values = dict(row)
    values["stored_spec"] = StoredSpec(values.pop("spec"))
    values["shapes"] = shapes_of(values["shapes"])
    values["state"] = State(values["state"])
    values["phase"] = values["phase"] and Phase(values["phase"])
    values["halt"] = values["halt"] and Halt(values["halt"])
    values["desired"] = Desired(values["desired"])
    values["reason"] = _REASONS.get(values["reason"])
    values["seat"] = seat_of(values["seat"])
    return Job(**values)


def shapes_of(pairs: list[list[int]] | None) -> tuple[JobSize, ...]:
    """Shapes from their column."""
    return tuple(JobSize(*pair) for pair in pairs or ())


def seat_of(value: dict[str, Any] | None) -> SeatSize | None:
    """Size of a seat from its column."""
    return None if value is None else SeatSize(**value)


def to_event(row: RowMapping | dict[str, Any]) -> StoredEvent:
    return StoredEvent(**{**row, "metrics": to_metrics(row["metrics"])})


def to_checkpoint(row: RowMapping) -> Checkpoint:
    return Checkpoint(**{**row, "metrics": to_metrics(row["metrics"])})


def to_metrics(value: dict[str, Any] | None) -> Metrics | None:
    return None if value is None else Metrics.model_validate(value)


def new_job_row(job: Job) -> dict[str, Any]:
    """Row of a new job, without the time of creation, which the database sets."""
    row = _plain_row(job)
    del row["created_at"]
    del row["stored_spec"]
    row["shapes"] = [list(shape) for shape in job.shapes] or None
    return row | {"spec": job.stored_spec.document, "base": job.base}


def changed_job_row(old: Job, new: Job) -> dict[str, Any]:
    """Columns of a job that may change, with `version` raised by one."""
    row = {name: value for name, value in _plain_row(new).items() if name not in _FIXED}
    row["shapes"] = [list(shape) for shape in new.shapes] or None
    if new.stored_spec is not old.stored_spec:
        row["spec"] = new.stored_spec.document
    if new.state is State.QUEUED and old.state is not State.QUEUED:
        row["queued_at"] = database_time()
    return row | {"version": old.version + 1}


def file_row(file: File) -> dict[str, Any]:
    row = {field.name: getattr(file, field.name) for field in fields(File)}
    return row | {"created_at": database_time()}


def checkpoint_row(checkpoint: Checkpoint) -> dict[str, Any]:
    row = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
    return row | {"metrics": _metrics(checkpoint.metrics)}


def event_row(event: NewEvent, job: Job, now: float) -> dict[str, Any]:
    """Row of an event. `job`: as it was when the event was read, so that its attempt is the one
    that wrote the event.
    """
    segment, line = event.source or (None, None)
    return {
        "id": new_id("ftevent-"),
        "project_id": job.project_id,
        "job_id": job.id,
        "attempt": job.attempt if event.source else None,
        "segment": segment,
        "line": line,
        "created_at": now if event.created_at is None else event.created_at,
        "level": event.level,
        "message": event.message,
        "metrics": _metrics(event.metrics),
    }


def insert_events(connection: Connection, job: Job, new: Sequence[NewEvent]) -> None:
    """Store the service's own events of a job, whose row is locked until the end of the
    transaction, as by all who store events: on PostgreSQL an event's position is given before its
    transaction ends, and who follows a job's events would never see one that becomes visible behind
    a later one.
    """
    connection.execute(select(jobs.c.id).where(jobs.c.id == job.id).with_for_update(key_share=True))
    now = connection.scalars(select(database_time())).one()
    connection.execute(insert(events), [event_row(event, job, now) for event in new])


def not_found(noun: str, row_id: str) -> NotFoundError:
    return NotFoundError(f"There is no {noun} {row_id!r} in this project.")


def cursor(
    connection: Connection, column: ColumnElement[int], *where: ColumnElement[bool], after: str
) -> int:
    """Value of `column` in the row that `after` names.

    Raises SpecError if the list has no such row.
    """
    found = connection.scalars(select(column).where(*where)).one_or_none()
    if found is None:
        raise SpecError(
            f"after = {after!r}: this list has no such item; use the id of an item of the "
            "previous page.",
            param="after",
        )
    return found


@dataclass(frozen=True)
class Listing:
    """Order of a list, and what its cursor names."""

    place: ColumnElement[int]
    """The column that orders the list."""
    id: ColumnElement[str]
    """The column that a cursor names."""
    scope: Sequence[ColumnElement[bool]]
    """Conditions that a cursor's row must fulfil."""
    newest_first: bool = True

    def apply(self, connection: Connection, query: Select[Any], after: str | None) -> Select[Any]:
        """The query in this order, behind the row `after`.

        Raises SpecError if the list has no such row.
        """
        query = query.order_by(self.place.desc() if self.newest_first else self.place.asc())
        if after is None:
            return query
        last = cursor(connection, self.place, self.id == after, *self.scope, after=after)
        return query.where(self.place < last if self.newest_first else self.place > last)


def page(
    connection: Connection, query: Select[Any], limit: int, record: Callable[[RowMapping], Item]
) -> Page[Item]:
    """The first `limit` rows of a query. One more is read, to know whether there are more."""
    rows = connection.execute(query.limit(limit + 1)).mappings().all()
    return Page(data=[record(row) for row in rows[:limit]], has_more=len(rows) > limit)


def _metrics(metrics: Metrics | None) -> dict[str, Any] | None:
    return None if metrics is None else metrics.model_dump(exclude_none=True)


def _plain_row(job: Job) -> dict[str, Any]:
    """Every field of a job, with enums and the size of its seat as plain values."""
    row = {name: getattr(job, name) for name in _FIELDS}
    row["seat"] = job.seat and asdict(job.seat)
    return row | {name: row[name] and row[name].value for name in _ENUMERATED}
