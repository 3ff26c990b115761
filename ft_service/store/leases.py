"""Leases of the reconciler: claim a job, store its change under the lease, and allocate slots."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.dml import ReturningUpdate

from ft_service.jobs.queue_snapshot import LONGEST_WAIT_SECONDS
from ft_service.jobs.states import Job, State
from ft_service.money import cost_of
from ft_service.store.database import StorePart, database_time, is_over, upsert
from ft_service.store.engines import NoSeatError, insert_engine, leave_seat, take_seat
from ft_service.store.records import Claim, JobChange
from ft_service.store.rows import JOB, changed_job_row, checkpoint_row, event_row, file_row, to_job
from ft_service.store.tables import (
    NEEDS_ATTENTION,
    QUEUED,
    checkpoints,
    engines,
    events,
    files,
    hosts,
    jobs,
    projects,
    slots,
)
from ft_service.store.tenants.usage import add_to_share, add_use, exact
from ft_service.store.webhooks import announce


class _NoSlot(Exception):
    """Raised to roll back a change whose slots cannot be taken."""


LONGEST_LEASE_SECONDS = 120.0
"""Upper bound of every lease."""
LONGEST_REST_SECONDS = 15.0
"""Upper bound of how far `looked_at` lies ahead, since a job may be left alone for a moment."""
HOST_SECONDS = 60.0
"""Time after its last announcement for which a host counts."""
OLDEST_NOTE_SECONDS = 30.0
"""How long the oldest note that was found bounds the search for jobs to look at."""
_WRITE_SECONDS = 10.0
"""Longest time from the reading of the clock for a note until others see it."""

_LOOKED_AHEAD = jobs.c.looked_at > database_time() + LONGEST_REST_SECONDS
_ASKED = jobs.c.looked_at <= 0.0
_SINCE = jobs.c.looked_at >= bindparam("since", type_=Double)
_OLDEST_NOTE = select(func.min(jobs.c.looked_at)).where(NEEDS_ATTENTION, ~_ASKED)
_CLAIMABLE = and_(
    is_over(jobs.c.lease_expires_at, LONGEST_LEASE_SECONDS),
    or_(jobs.c.host.is_(None), jobs.c.host == bindparam("for_host")),
)
_MINE = and_(NEEDS_ATTENTION, _CLAIMABLE)
_IDLE = jobs.c.looked_at <= database_time() - bindparam("idle_seconds", type_=Double)
_UNTENDED = jobs.c.looked_at <= database_time() - bindparam("untended_seconds", type_=Double)
DUE = and_(
    QUEUED,
    _CLAIMABLE,
    is_over(jobs.c.not_before, LONGEST_WAIT_SECONDS),
    jobs.c.slots <= bindparam("host_slots"),
)
_HAS_LARGER_HOST = (
    exists()
    .where(jobs.c.host.is_(None), hosts.c.slots >= jobs.c.slots)
    .where(hosts.c.seen_at.between(database_time() - HOST_SECONDS, database_time() + HOST_SECONDS))
    .correlate(jobs)
)
# A job in its back-off is not due: what is decided for it changes nothing, and it would be claimed
# again at once.
_TOO_LARGE = and_(
    QUEUED,
    _CLAIMABLE,
    is_over(jobs.c.not_before, LONGEST_WAIT_SECONDS),
    jobs.c.slots > bindparam("host_slots"),
    jobs.c.pending.is_(None),
    ~_HAS_LARGER_HOST,
)
_NOW = select(database_time())
_FREE: dict[str, Any] = {"lease_owner": None, "lease_token": None, "lease_expires_at": 0.0}


def _claim_first(
    candidates: Sequence[Select[tuple[str]]], *still: ColumnElement[bool]
) -> ReturningUpdate[Any]:
    """Claim the first row of the first query in `candidates` that has rows, if `still` holds."""
    # The condition stands twice: inside to find the row, outside so that only one of two concurrent
    # claims gets it.
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


def _claim_active(*kinds: ColumnElement[bool]) -> ReturningUpdate[Any]:
    """Claim a job that may need attention: of the first of these kinds that has one which is
    due.
    """
    # `looked_at` in the future: the clock was set back since. Queries of their own, so that an
    # index serves each.
    ahead = select(jobs.c.id).where(_MINE, _LOOKED_AHEAD).order_by(jobs.c.looked_at)
    due = [
        select(jobs.c.id).where(_MINE, kind, noted).order_by(jobs.c.looked_at)
        for kind in kinds
        for noted in (_ASKED, _SINCE)
    ]
    return _claim_first([ahead, *due], _MINE, or_(*kinds, _LOOKED_AHEAD))


# Built once: building such a statement takes longer than running it.
_HAS_PROCESSES = jobs.c.phase.is_not(None)
_WITH_PROCESSES = and_(_HAS_PROCESSES, _UNTENDED)
_NEW = and_(~_HAS_PROCESSES, _IDLE)
_CLAIM = _claim_active(_WITH_PROCESSES, _NEW)
_CLAIM_NEW_FIRST = _claim_active(_NEW, _WITH_PROCESSES)
_CLAIM_GIVEN = _claim_first([select(jobs.c.id).where(jobs.c.id == bindparam("job_id"))], _MINE)
# Those that a user has asked something of are claimed instead; others rest until their time.
_TO_LOOK_AT = and_(_MINE, _HAS_PROCESSES, ~_ASKED, _IDLE)
_IDS_TO_LOOK_AT = select(jobs.c.id).where(_TO_LOOK_AT, _SINCE).order_by(jobs.c.looked_at)
_JOBS_TO_LOOK_AT = select(*JOB, jobs.c.looked_at, database_time().label("now")).where(
    _TO_LOOK_AT, jobs.c.id.in_(bindparam("job_ids", expanding=True))
)
_CLAIM_QUEUED = _claim_first([select(jobs.c.id).where(jobs.c.id == bindparam("job_id"))], DUE)
_CLAIM_TOO_LARGE = _claim_first(
    [select(jobs.c.id).where(_TOO_LARGE).order_by(jobs.c.priority.desc(), jobs.c.position)],
    _TOO_LARGE,
)


class LeaseStore(StorePart):
    """Claims of jobs, changes under them, and slots."""

    _since = 0.0
    _since_until = float("-inf")
    """When the oldest note is looked up again, by the process's own clock."""

    def claim(
        self,
        *,
        host: str,
        owner: str,
        lease_seconds: float,
        idle_seconds: float,
        untended_seconds: float | None = None,
        new_first: bool = False,
    ) -> Claim | None:
        """Claim one job that may need attention: one compare-and-set statement.

        Candidates: validating, running, or cancelled and still stopping; whose host is None or
        `host`; whose lease is free or has expired; not looked at for `idle_seconds` (a request or a
        change of state resets that), or, if it is running or stopping, for `untended_seconds`
        (None: the same), since `jobs_to_look_at` finds it before. One that is running or stopping
        is taken before one that is being validated, with `new_first` after it; of several the one
        looked at longest ago. A time further ahead than any that is written was stored before the
        clock was set back, and counts as past. None may also mean that another process claimed the
        job in the same moment.
        """
        statement = _CLAIM_NEW_FIRST if new_first else _CLAIM
        return self._claim(
            statement,
            for_host=host,
            owner=owner,
            lease_seconds=lease_seconds,
            idle_seconds=idle_seconds,
            untended_seconds=idle_seconds if untended_seconds is None else untended_seconds,
            since=self._oldest_note(),
        )

    def claim_given(
        self, job_id: str, *, host: str, owner: str, lease_seconds: float
    ) -> Claim | None:
        """Claim a job that `claim` would give too, however recently it was looked at.

        None if it needs no attention any more, or another process has claimed it.
        """
        values = {"for_host": host, "owner": owner, "lease_seconds": lease_seconds}
        return self._claim(_CLAIM_GIVEN, **values, job_id=job_id)

    def claim_queued(
        self, job_id: str, *, host: str, owner: str, lease_seconds: float, host_slots: int
    ) -> Claim | None:
        """Claim a queued job that the queue has chosen.

        None if it is not due any more, or another process has claimed it.
        """
        values = {
            "for_host": host,
            "owner": owner,
            "lease_seconds": lease_seconds,
            "host_slots": host_slots,
        }
        return self._claim(_CLAIM_QUEUED, **values, job_id=job_id)

    def claim_too_large(
        self, *, host: str, owner: str, lease_seconds: float, host_slots: int
    ) -> Claim | None:
        """Claim a due job that needs more slots than the host has, and than any other that may
        start it, and does not say so yet.
        """
        values = {"for_host": host, "owner": owner, "lease_seconds": lease_seconds}
        return self._claim(_CLAIM_TOO_LARGE, **values, host_slots=host_slots)

    def _claim(self, statement: ReturningUpdate[Any], **values: Any) -> Claim | None:
        token = secrets.token_hex(16)
        with self._database.writing() as connection:
            row = connection.execute(statement, values | {"token": token}).mappings().one_or_none()
        if row is None:
            return None
        found = dict(row)
        now = found.pop("looked_at")
        return Claim(job=to_job(found), token=token, now=now)

    def ids_to_look_at(self, *, host: str, idle_seconds: float) -> list[str]:
        """Return the ids of running and stopping jobs that `claim` would give too, those noted
        longest ago first. Nobody has claimed them, and no user has asked something of them since.
        """
        values = {"for_host": host, "idle_seconds": idle_seconds, "since": self._oldest_note()}
        with self._database.reading() as connection:
            return list(connection.scalars(_IDS_TO_LOOK_AT, values))

    def _oldest_note(self) -> float:
        """Return a time before which no job that needs attention was noted; 0: not known.

        While a transaction is open, PostgreSQL removes no old version of a row that it might see,
        and every search in the order of the notes walks through all of them that lie before the
        oldest job: within an hour, hundreds of thousands. Notes only rise, but for those of a
        clock that is set back and those of users' requests, which are searched for themselves.
        """
        if self._database.is_shared and time.monotonic() >= self._since_until:
            with self._database.reading() as connection:
                oldest = connection.scalars(_OLDEST_NOTE).one() or 0.0
            self._since = max(0.0, oldest - _WRITE_SECONDS)
            self._since_until = time.monotonic() + OLDEST_NOTE_SECONDS
        return self._since

    def jobs_to_look_at(
        self, job_ids: Sequence[str], *, host: str, idle_seconds: float
    ) -> tuple[list[tuple[Job, float]], float]:
        """Return those of `ids_to_look_at` that still are, each with the time at which a look at it
        was noted, and the time, both of the database. Whoever finds nothing to do for one notes
        that now and then by `looked_at`; a report is stored by `apply` without a claim; the others
        are claimed.
        """
        values = {"for_host": host, "idle_seconds": idle_seconds, "job_ids": list(job_ids)}
        with self._database.reading() as connection:
            rows = [dict(row) for row in connection.execute(_JOBS_TO_LOOK_AT, values).mappings()]
        now = max((row.pop("now") for row in rows), default=0.0)
        noted = {row["id"]: row.pop("looked_at") for row in rows}
        return [(to_job(row), noted[row["id"]]) for row in rows], now

    def looked_at(self, job_ids: Sequence[str]) -> None:
        """Note that nothing is to be done now for jobs of `jobs_to_look_at`, unless a user has
        asked something of them since.
        """
        mine = (jobs.c.id.in_(job_ids), jobs.c.looked_at > 0.0)
        with self._database.writing() as connection:
            connection.execute(update(jobs).where(*mine).values(looked_at=database_time()))

    def look_again(self, job_id: str) -> None:
        """Let the next `claim` find a job, however recently it was looked at."""
        with self._database.writing() as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(looked_at=0.0))

    def apply(self, claim: Claim, change: JobChange) -> bool:
        """Store a change and end the lease.

        False, with nothing stored: the lease was lost, the job changed, a slot or the last seat was
        taken, or the project would run too many ranks.

        Without a token, of a job that nobody has claimed, a lease or a change since `claim.now`
        counts as lost. The lease ends either way, so that the job can be claimed again at once.
        Events with a `source` belong to the attempt of `claim.job`. Columns of `change.job` that
        never change, such as id and request, are not written.
        """
        assert change.job.id == claim.job.id, "a change is of the job that was claimed"
        try:
            with self._database.writing() as connection:
                if _write_job(connection, claim, change.job, change.rest_seconds):
                    _write_rest(connection, claim, change)
                    return True
        except (_NoSlot, NoSeatError):
            pass
        if claim.token is None:
            return False
        with self._database.writing() as connection:
            mine = (jobs.c.id == claim.job.id, jobs.c.lease_token == claim.token)
            connection.execute(update(jobs).where(*mine).values(**_FREE))
        return False

    def free_slots(self, host: str, total: int) -> list[int]:
        """Free slot numbers of a host in 0..total-1, ascending."""
        with self._database.reading() as connection:
            held = set(connection.scalars(select(slots.c.slot).where(slots.c.host == host)))
        return [slot for slot in range(total) if slot not in held]

    def move_host(self, old: str, new: str) -> None:
        """Rename a host: its jobs, its slots and its engines are those of `new` from now on.

        For a host that no reconciler claims jobs for any more. Slots that `new` has already given
        to others get other numbers.
        """
        with self._database.writing() as connection:
            numbers = select(slots.c.slot)
            moved = list(
                connection.scalars(numbers.where(slots.c.host == old).order_by(slots.c.slot))
            )
            taken = set(connection.scalars(numbers.where(slots.c.host == new)))
            free = (number for number in itertools.count() if number not in taken)
            for slot, number in zip(moved, free, strict=False):
                row = (slots.c.host == old, slots.c.slot == slot)
                connection.execute(update(slots).where(*row).values(host=new, slot=number))
            # A request that has read the job before would write the old host again.
            connection.execute(
                update(jobs).where(jobs.c.host == old).values(host=new, version=jobs.c.version + 1)
            )
            connection.execute(update(engines).where(engines.c.host == old).values(host=new))
            connection.execute(delete(hosts).where(hosts.c.host == old))
        self._database.changed.set()

    def attempts_of(self, host: str) -> list[tuple[str, int]]:
        """Job and number of each attempt on a host whose end is not known."""
        query = select(jobs.c.id, jobs.c.attempt).where(
            NEEDS_ATTENTION, jobs.c.host == host, jobs.c.attempt > 0
        )
        with self._database.reading() as connection:
            return [(job_id, attempt) for job_id, attempt in connection.execute(query)]

    def held_slots(self, job_id: str) -> list[int]:
        """Slot numbers that a job holds itself, ascending."""
        mine = (slots.c.job_id == job_id, slots.c.engine_id.is_(None))
        with self._database.reading() as connection:
            return list(
                connection.scalars(select(slots.c.slot).where(*mine).order_by(slots.c.slot))
            )


def _write_job(connection: Connection, claim: Claim, job: Job, rest_seconds: float) -> bool:
    values = changed_job_row(claim.job, job) | _FREE
    if job.state is not claim.job.state:  # act on the new state at once
        values["looked_at"] = 0.0
    elif rest_seconds:
        values["looked_at"] = claim.now + min(rest_seconds, LONGEST_REST_SECONDS)
    guard = (
        jobs.c.id == claim.job.id,
        is_over(jobs.c.lease_expires_at, LONGEST_LEASE_SECONDS)
        if claim.token is None
        else jobs.c.lease_token == claim.token,
        jobs.c.version == claim.job.version,
    )
    return connection.execute(update(jobs).where(*guard).values(values)).rowcount == 1


def _write_rest(connection: Connection, claim: Claim, change: JobChange) -> None:
    job = change.job
    if change.release_slots and claim.job.engine_id is not None:
        leave_seat(connection, claim.job)
    elif change.release_slots:
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
    if (job.joules or 0.0) > (claim.job.joules or 0.0):
        joules = (job.joules or 0.0) - (claim.job.joules or 0.0)
        grams = (job.co2_grams or 0.0) - (claim.job.co2_grams or 0.0)
        add_use(connection, job.project_id, job.key_id, claim.now, joules=joules, co2_grams=grams)
    if job.state is not claim.job.state:
        announce(connection, job)
    if change.new_engine is not None:
        insert_engine(connection, job, change.new_engine)
    if change.take_slots:
        _take_slots(
            connection,
            job,
            change.take_slots,
            job.engine_id if change.new_engine is not None else None,
        )
    if change.take_seat:
        take_seat(connection, job)


def _take_slots(
    connection: Connection, job: Job, taken: Sequence[int], engine_id: str | None
) -> None:
    """Take slots for a job, or for the engine that it starts."""
    now = connection.scalars(_NOW).one()
    mine = {
        "host": job.host,
        "project_id": job.project_id,
        "job_id": job.id,
        "attempt": job.attempt,
        "taken_at": now,
    }
    mine |= {"engine_id": engine_id}
    try:
        connection.execute(insert(slots), [{"slot": slot, **mine} for slot in taken])
    except IntegrityError as error:
        raise _NoSlot from error
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(taken_at=now))
    # The lock on the project's row makes two processes that place jobs of one project count one
    # after the other. key_share is compatible with the lock that the new slots' foreign key holds;
    # a stronger one would deadlock.
    of_project = (
        select(projects.c.max_slots)
        .where(projects.c.id == job.project_id)
        .with_for_update(key_share=True)
    )
    limit = connection.scalars(of_project).one()
    if limit is not None:
        held = connection.scalars(
            select(func.count()).where(slots.c.project_id == job.project_id)
        ).one()
        if held > limit:
            raise _NoSlot


def _release_slots(connection: Connection, job: Job) -> None:
    """Free a job's slots, and add their use to the job and its project."""
    mine = (slots.c.job_id == job.id, slots.c.engine_id.is_(None))
    held = select(func.count(), func.min(slots.c.taken_at), database_time()).where(*mine)
    number, taken_at, now = connection.execute(held).one()
    if not number:
        return
    seconds = exact(max(0.0, now - taken_at))
    # Locks the project first, as who stores a file does.
    add_to_share(connection, job.project_id, number, seconds, now)
    slot_seconds = number * seconds
    cost = cost_of(slot_seconds, job.price)
    use = {"slot_seconds": slot_seconds, "cost": cost}
    currency = None if job.price is None else job.currency
    add_use(connection, job.project_id, job.key_id, now, currency, **use)
    connection.execute(delete(slots).where(*mine))
    used = {
        "held_seconds": jobs.c.held_seconds + seconds,
        "slot_seconds": jobs.c.slot_seconds + slot_seconds,
        "cost": jobs.c.cost + cost,
    }
    connection.execute(
        update(jobs).where(jobs.c.id == job.id).values(**used, taken_at=None, ends_at=None)
    )
