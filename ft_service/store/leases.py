"""The reconciler's side: claim a job, write what became of it under the lease, and who holds which slot."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Double, Select, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.dml import ReturningUpdate

from ft_service.jobs.line import LONGEST_WAIT_SECONDS, accrued, remembered
from ft_service.jobs.states import Job, State
from ft_service.store.database import Database, database_time, is_over, upsert
from ft_service.store.records import Claim, JobChange
from ft_service.store.rows import JOB, changed_job_row, checkpoint_row, event_row, file_row, to_job
from ft_service.store.tables import NEEDS_ATTENTION, QUEUED, checkpoints, events, files, jobs, projects, slots
from ft_service.store.tenants.usage import add_use, exact
from ft_service.store.webhooks import announce


class _NoSlot(Exception):
    """Undoes the transaction of a change."""


LONGEST_LEASE_SECONDS = 120.0
"""No lease is longer."""
LONGEST_REST_SECONDS = 15.0
"""`looked_at` lies this far ahead at most: a job may be left alone for a moment."""

_LOOKED_AHEAD = jobs.c.looked_at > database_time() + LONGEST_REST_SECONDS
_CLAIMABLE = and_(
    is_over(jobs.c.lease_expires_at, LONGEST_LEASE_SECONDS),
    or_(jobs.c.host.is_(None), jobs.c.host == bindparam("for_host")),
)
_MINE = and_(NEEDS_ATTENTION, _CLAIMABLE)
_IDLE = jobs.c.looked_at <= database_time() - bindparam("idle_seconds", type_=Double)
DUE = and_(QUEUED, _CLAIMABLE, is_over(jobs.c.not_before, LONGEST_WAIT_SECONDS), jobs.c.slots <= bindparam("host_slots"))
_TOO_LARGE = and_(QUEUED, _CLAIMABLE, jobs.c.slots > bindparam("host_slots"), jobs.c.pending.is_(None))
_NOW = select(database_time())
_FREE: dict[str, Any] = {"lease_owner": None, "lease_token": None, "lease_expires_at": 0.0}


def _claim_first(candidates: Sequence[Select[tuple[str]]], *still: ColumnElement[bool]) -> ReturningUpdate[Any]:
    """`candidates`: the first row of the first of these that has any."""
    # The condition stands twice: inside to find the row, outside so that of two claimers who found the same only one gets it.
    first = [rows.limit(1).scalar_subquery() for rows in candidates]
    return (
        update(jobs)
        .where(jobs.c.id == (first[0] if len(first) == 1 else func.coalesce(*first)), *still)
        .values(
            lease_owner=bindparam("owner"),
            lease_token=bindparam("token"),
            lease_expires_at=database_time() + bindparam("lease_seconds", type_=Double),
            looked_at=database_time(),
        )
        .returning(*JOB, jobs.c.looked_at)
    )


# Built once: to put such a statement together takes longer than to run it.
_CLAIM = _claim_first(
    [
        # Looked at before the clock went back, and so longer ago than any other. By itself, or no index would serve either.
        select(jobs.c.id).where(_MINE, _LOOKED_AHEAD).order_by(jobs.c.looked_at),
        select(jobs.c.id).where(_MINE, _IDLE).order_by(jobs.c.looked_at),
    ],
    _MINE,
    or_(_IDLE, _LOOKED_AHEAD),
)
_CLAIM_QUEUED = _claim_first([select(jobs.c.id).where(jobs.c.id == bindparam("job_id"))], DUE)
_CLAIM_TOO_LARGE = _claim_first(
    [select(jobs.c.id).where(_TOO_LARGE).order_by(jobs.c.priority.desc(), jobs.c.position)], _TOO_LARGE
)


class LeaseStore(Database):
    """Claims, changes under them, and slots."""

    def claim(self, *, host: str, owner: str, lease_seconds: float, idle_seconds: float) -> Claim | None:
        """Claim one job that may need attention: one compare-and-set statement.

        Candidates: validating, running, or cancelled and still stopping; whose host is None or `host`; whose lease is
        free or has expired; not looked at for `idle_seconds` (a verb or a change of state counts as never looked at). The
        one looked at longest ago is taken. A look or a lease that lies further ahead than any is made was before the clock went
        back, and is over. None may also mean that another claimed it in the same moment.
        """
        return self._claim(_CLAIM, for_host=host, owner=owner, lease_seconds=lease_seconds, idle_seconds=idle_seconds)

    def claim_queued(self, job_id: str, *, host: str, owner: str, lease_seconds: float, host_slots: int) -> Claim | None:
        """Claim a queued job that the queue has chosen. None if meanwhile it is not due any more, or another claimed it."""
        values = {"for_host": host, "owner": owner, "lease_seconds": lease_seconds, "host_slots": host_slots}
        return self._claim(_CLAIM_QUEUED, **values, job_id=job_id)

    def claim_too_large(self, *, host: str, owner: str, lease_seconds: float, host_slots: int) -> Claim | None:
        """Claim a queued job that needs more than all the slots of the host, and has not been told why it waits."""
        values = {"for_host": host, "owner": owner, "lease_seconds": lease_seconds}
        return self._claim(_CLAIM_TOO_LARGE, **values, host_slots=host_slots)

    def _claim(self, statement: ReturningUpdate[Any], **values: Any) -> Claim | None:
        token = secrets.token_hex(16)
        with self.writing() as connection:
            row = connection.execute(statement, values | {"token": token}).mappings().one_or_none()
        if row is None:
            return None
        found = dict(row)
        now = found.pop("looked_at")
        return Claim(job=to_job(found), token=token, now=now)

    def look_again(self, job_id: str) -> None:
        """Something has come up for a job: the next `claim` finds it, however lately it was looked at."""
        with self.writing() as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(looked_at=0.0))

    def apply(self, claim: Claim, change: JobChange) -> bool:
        """Write a change and end the lease. False, with nothing written: lease lost, job changed, a slot taken, or the project
        would run more ranks than it may.

        The lease ends either way, so that nobody has to wait for its end before looking again. Events with a `source` belong
        to the attempt of `claim.job`. Of `change.job` the identity, request and spec are not written: they never change.
        """
        assert change.job.id == claim.job.id, "a change is of the job that was claimed"
        try:
            with self.writing() as connection:
                if _write_job(connection, claim, change.job, change.rest_seconds):
                    _write_rest(connection, claim, change)
                    return True
        except _NoSlot:
            pass
        with self.writing() as connection:
            mine = (jobs.c.id == claim.job.id, jobs.c.lease_token == claim.token)
            connection.execute(update(jobs).where(*mine).values(**_FREE))
        return False

    def free_slots(self, host: str, total: int) -> list[int]:
        """Slot numbers in 0..total-1 that nobody holds on a host, ascending."""
        return self.free_slots_of({host: total})[host]

    def free_slots_of(self, totals: Mapping[str, int]) -> dict[str, list[int]]:
        """The same of several hosts. `totals`: host → all its slots."""
        with self.reading() as connection:
            rows = connection.execute(select(slots.c.host, slots.c.slot).where(slots.c.host.in_(totals))).all()
        held = {(row.host, row.slot) for row in rows}
        return {host: [slot for slot in range(total) if (host, slot) not in held] for host, total in totals.items()}

    def held_slots(self, job_id: str) -> dict[str, list[int]]:
        """Host → slot numbers that a job holds there, ascending; the hosts by name."""
        with self.reading() as connection:
            query = select(slots.c.host, slots.c.slot).where(slots.c.job_id == job_id).order_by(slots.c.host, slots.c.slot)
            rows = connection.execute(query).all()
        found: dict[str, list[int]] = {}
        for host, slot in rows:
            found.setdefault(host, []).append(slot)
        return found


def _write_job(connection: Connection, claim: Claim, job: Job, rest_seconds: float) -> bool:
    values = changed_job_row(claim.job, job) | _FREE
    if job.state is not claim.job.state:  # what the new state asks for need not wait for its turn
        values["looked_at"] = 0.0
    elif rest_seconds:
        values["looked_at"] = claim.now + rest_seconds
    guard = (jobs.c.id == claim.job.id, jobs.c.lease_token == claim.token, jobs.c.version == claim.job.version)
    return connection.execute(update(jobs).where(*guard).values(values)).rowcount == 1


def _write_rest(connection: Connection, claim: Claim, change: JobChange) -> None:
    job = change.job
    if change.release_slots:
        _release_slots(connection, job)
    if change.events:
        rows = [event_row(event, claim.job, claim.now) for event in change.events]
        connection.execute(upsert(connection, events).on_conflict_do_nothing(), rows)
    if change.checkpoints:
        rows = [checkpoint_row(checkpoint) for checkpoint in change.checkpoints]
        connection.execute(upsert(connection, checkpoints).on_conflict_do_nothing(), rows)
    for file in change.files:
        connection.execute(insert(files).values(file_row(file)))
    if claim.job.state is State.VALIDATING and job.state is not State.VALIDATING:
        add_use(connection, job.project_id, job.key_id, claim.now, jobs=1)
    if job.seen_tokens > claim.job.seen_tokens:
        more = job.seen_tokens - claim.job.seen_tokens
        add_use(connection, job.project_id, job.key_id, claim.now, tokens=more)
    if job.state is not claim.job.state:
        announce(connection, job)
    if change.take_slots:
        _take_slots(connection, job, change.take_slots)


def _take_slots(connection: Connection, job: Job, taken: Mapping[str, Sequence[int]]) -> None:
    now = connection.scalars(_NOW).one()
    mine = {"project_id": job.project_id, "job_id": job.id, "attempt": job.attempt, "taken_at": now}
    try:
        rows = [{"host": host, "slot": slot, **mine} for host, numbers in taken.items() for slot in numbers]
        connection.execute(insert(slots), rows)
    except IntegrityError as error:
        raise _NoSlot from error
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(taken_at=now))
    # The lock on the project's row has two that place jobs of one project in the same moment count one after the other. One
    # that goes with the share which the new slots' reference to the project has taken: else each would wait for the other.
    of_project = select(projects.c.max_slots).where(projects.c.id == job.project_id).with_for_update(key_share=True)
    limit = connection.scalars(of_project).one()
    if limit is not None:
        held = connection.scalars(select(func.count()).where(slots.c.project_id == job.project_id)).one()
        if held > limit:
            raise _NoSlot


def _release_slots(connection: Connection, job: Job) -> None:
    """Free a job's slots, and add what was used to the job and to its project."""
    held = select(func.count(), func.min(slots.c.taken_at), database_time()).where(slots.c.job_id == job.id)
    number, taken_at, now = connection.execute(held).one()
    if not number:
        return
    seconds = exact(0.0 if taken_at is None else max(0.0, now - taken_at))
    add_use(connection, job.project_id, job.key_id, now, slot_seconds=number * seconds)
    connection.execute(delete(slots).where(slots.c.job_id == job.id))
    used = {"held_seconds": jobs.c.held_seconds + seconds, "slot_seconds": jobs.c.slot_seconds + number * seconds}
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**used, taken_at=None, ends_at=None))
    project = projects.c.id == job.project_id
    query = select(projects.c.used, projects.c.used_at).where(project).with_for_update(key_share=True)
    before = connection.execute(query).one()
    total = remembered(before.used, now - before.used_at) + accrued(number, seconds)
    connection.execute(update(projects).where(project).values(used=total, used_at=now))
