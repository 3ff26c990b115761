"""Engines, the seats of jobs in them, and what they use.

An engine holds its slots (`slots.engine_id`) until its processes are gone. Its slot-seconds are
divided among its seats: whenever a job takes or leaves one, the time since the last such moment is
divided equally among the jobs that sat there then. Usage gets a job's part when it leaves, and time
without a job, under no key, when the engine ends. The limit max_slots counts the slots of an engine
once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from ft_service.jobs.queue_snapshot import fit_together
from ft_service.jobs.states import Job
from ft_service.money import co2_grams, cost_of
from ft_service.store.database import StorePart, database_time
from ft_service.store.records import NewEngine
from ft_service.store.rows import seat_of
from ft_service.store.tables import LIVE, SEATED, engines, jobs, slots
from ft_service.store.tenants.usage import add_to_share, add_use, exact

_NOW = select(database_time())
_NOBODY = ""
"""In an engine's use: the time without a job."""


class NoSeatError(Exception):
    """Raised to roll back a change whose job can take no seat in its engine."""


@dataclass(frozen=True)
class SeatedJob:
    """A job that an engine trains."""

    id: str
    base: str
    since: float
    """When it took its seat, in seconds since the epoch on the database's clock."""
    slot_seconds: float
    """Its share of the engine's slot-seconds until now."""


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """An engine with its jobs. Times are seconds since the epoch on the database's clock."""

    id: str
    project_id: str
    host: str
    share_key: str
    fault_group: str | None
    ranks: int
    most_seats: int
    room: int | None
    created_at: float
    divided_at: float
    """When a job last took or left a seat."""
    closing_at: float | None
    """When it was asked to end; None: it was not."""
    ended_at: float | None
    price: int | None = None
    """Of a slot-hour, as in Job; None: no price is known."""
    currency: str | None = None
    grams_per_kwh: float | None = None
    joules: float | None = None
    """Energy that was reported so far; None: not measured."""
    seats: tuple[SeatedJob, ...] = ()
    """The jobs that it trains, the oldest first."""

    @property
    def base(self) -> str | None:
        """Name of their base; None: there are none."""
        return self.seats[0].base if self.seats else None


class EngineStore(StorePart):
    """Engines of all projects."""

    def live_engines(
        self, *, host: str | None = None, project_id: str | None = None
    ) -> list[EngineRecord]:
        """Engines that hold slots, the oldest first.

        `host`, `project_id`: only theirs; None: all.
        """
        query = select(engines).where(LIVE).order_by(engines.c.created_at, engines.c.id)
        if host is not None:
            query = query.where(engines.c.host == host)
        if project_id is not None:
            query = query.where(engines.c.project_id == project_id)
        with self._database.reading() as connection:
            rows = connection.execute(query).mappings().all()
            now = connection.scalars(_NOW).one()
            seated = (
                select(jobs.c.engine_id, jobs.c.id, jobs.c.base, jobs.c.taken_at)
                .where(SEATED)
                .order_by(jobs.c.position)
            )
            seats: dict[str, list[Any]] = defaultdict(list)
            for job in connection.execute(seated) if rows else ():
                seats[job.engine_id].append(job)
        return [_record(dict(row), seats[row["id"]], now) for row in rows]

    def engine_slots(self, engine_id: str) -> list[int]:
        """Slot numbers that an engine holds, ascending; empty once it has ended."""
        query = select(slots.c.slot).where(slots.c.engine_id == engine_id).order_by(slots.c.slot)
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def limits(self, engine_id: str) -> NewEngine:
        """What an engine was given."""
        query = select(engines.c.most_seats, engines.c.room).where(engines.c.id == engine_id)
        with self._database.reading() as connection:
            return NewEngine(*connection.execute(query).one())

    def close_engine(self, engine_id: str, *, if_idle: bool) -> bool:
        """Let no more jobs join an engine, which is asked to end.

        False: that was done before, or, with `if_idle`, it trains a job.
        """
        with self._database.writing() as connection:
            _lock(connection, engine_id)
            if if_idle and _seated(connection, engine_id):
                return False
            closes = update(engines).where(
                engines.c.id == engine_id, LIVE, engines.c.closing_at.is_(None)
            )
            return connection.execute(closes.values(closing_at=database_time())).rowcount == 1

    def end_engine(self, engine_id: str) -> bool:
        """Free the slots of an engine whose processes are gone. False: that was done before."""
        with self._database.writing() as connection:
            now = connection.scalars(_NOW).one()
            unused = _divide(connection, engine_id, now).get(_NOBODY, 0.0)
            ends = update(engines).where(engines.c.id == engine_id, LIVE).values(ended_at=now)
            if connection.execute(ends).rowcount != 1:
                return False
            engine = connection.execute(select(engines).where(engines.c.id == engine_id)).one()
            held = select(slots.c.project_id, func.count(), func.min(slots.c.taken_at)).where(
                slots.c.engine_id == engine_id
            )
            for project_id, number, taken_at in connection.execute(
                held.group_by(slots.c.project_id)
            ).all():
                add_to_share(connection, project_id, number, exact(max(0.0, now - taken_at)), now)
                cost = cost_of(unused, engine.price)
                use = {"slot_seconds": unused, "cost": cost} | _nobodys_energy(engine)
                add_use(connection, project_id, None, now, engine.currency, **use)
            connection.execute(delete(slots).where(slots.c.engine_id == engine_id))
        self._database.changed.set()
        return True

    def used(self, engine_id: str, job_id: str) -> float:
        """Slot-seconds that a job's seat has taken until now; 0 if it has none there."""
        query = select(engines.c.use, engines.c.divided_at, engines.c.ranks, database_time())
        with self._database.reading() as connection:
            engine = connection.execute(query.where(engines.c.id == engine_id)).one_or_none()
            seated = _seated(connection, engine_id)
        if engine is None or job_id not in seated:
            return 0.0
        use, divided_at, ranks, now = engine
        return (use or {}).get(job_id, 0.0) + exact(
            ranks * max(0.0, now - divided_at) / len(seated)
        )

    def measured(self, engine_id: str, joules: float) -> None:
        """Divide the energy that an engine has taken since the last report equally among the jobs
        that sit there now.

        `joules`: since its start; less than was reported before changes nothing.
        """
        with self._database.writing() as connection:
            _lock(connection, engine_id)
            columns = select(engines.c.joules, engines.c.energy)
            row = connection.execute(columns.where(engines.c.id == engine_id, LIVE)).one_or_none()
            if row is None or joules <= (row.joules or 0.0):
                return
            sat = _seated(connection, engine_id) or [_NOBODY]
            energy: dict[str, float] = dict(row.energy or {})
            for job_id in sat:
                each = (joules - (row.joules or 0.0)) / len(sat)
                energy[job_id] = energy.get(job_id, 0.0) + each
            values = {"joules": joules, "energy": energy}
            connection.execute(update(engines).where(engines.c.id == engine_id).values(**values))

    def ended_engines(self, ids: Sequence[str], seconds: float) -> set[str]:
        """Of these ids those of engines that ended more than so many seconds ago."""
        long_ago = engines.c.ended_at < database_time() - seconds
        with self._database.reading() as connection:
            return set(
                connection.scalars(select(engines.c.id).where(engines.c.id.in_(ids), long_ago))
            )


def _nobodys_energy(engine: Any) -> dict[str, float]:
    """What an engine's row says of the energy without a job."""
    joules = (engine.energy or {}).get(_NOBODY, 0.0)
    return {"joules": joules, "co2_grams": co2_grams(joules, engine.grams_per_kwh) or 0.0}


def _record(row: dict[str, Any], seats: Sequence[Any], now: float) -> EngineRecord:
    """`seats`: (id, base, taken_at) of its jobs."""
    use: Mapping[str, float] = row.pop("use") or {}
    del row["energy"]
    since_then = row["ranks"] * max(0.0, now - row["divided_at"]) / max(1, len(seats))
    seated = [
        SeatedJob(
            job.id,
            job.base,
            now if job.taken_at is None else job.taken_at,
            use.get(job.id, 0.0) + since_then,
        )
        for job in seats
    ]
    return EngineRecord(**row, seats=tuple(seated))


def insert_engine(connection: Connection, job: Job, new: NewEngine) -> None:
    """Store a new engine, in which the job takes the first seat."""
    row = {
        "id": job.engine_id,
        "project_id": job.project_id,
        "host": job.host,
        "fault_group": job.fault_group,
    }
    now = connection.scalars(_NOW).one()
    times = {"created_at": now, "divided_at": now}
    values = {
        "share_key": job.share_key,
        "ranks": job.slots,
        "most_seats": new.most_seats,
        "room": new.room,
        "price": job.price,
        "currency": job.currency,
        "grams_per_kwh": job.grams_per_kwh,
    }
    connection.execute(insert(engines).values(**row, **values, **times))


def take_seat(connection: Connection, job: Job) -> None:
    """Note that a job, whose row names the engine already, takes a seat.

    Raises NoSeatError if none is free, or it ends.
    """
    assert job.engine_id is not None
    now = connection.scalars(_NOW).one()
    _lock(connection, job.engine_id)
    free = select(engines.c.most_seats, engines.c.room).where(
        engines.c.id == job.engine_id, LIVE, engines.c.closing_at.is_(None)
    )
    engine = connection.execute(free).one_or_none()
    taken = connection.scalars(select(jobs.c.seat).where(jobs.c.engine_id == job.engine_id)).all()
    if (
        engine is None
        or len(taken) > engine.most_seats
        or not fit_together(map(seat_of, taken), engine.room)
    ):
        raise NoSeatError
    _divide(connection, job.engine_id, now, joining=job.id)
    rate = select(engines.c.price, engines.c.currency, engines.c.grams_per_kwh).where(
        engines.c.id == job.engine_id
    )
    values = {"taken_at": now, **connection.execute(rate).mappings().one()}
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**values))


def leave_seat(connection: Connection, job: Job) -> None:
    """Free a job's seat, and add its share of the engine's use to the job and its project."""
    assert job.engine_id is not None
    now = connection.scalars(_NOW).one()
    shares = _divide(connection, job.engine_id, now)
    used = shares.pop(job.id, 0.0)
    engine = engines.c.id == job.engine_id
    energy = dict(connection.scalars(select(engines.c.energy).where(engine)).one() or {})
    joules = energy.pop(job.id, 0.0)
    connection.execute(update(engines).where(engine).values(use=shares, energy=energy))
    cost = cost_of(used, job.price)
    currency = None if job.price is None else job.currency
    add_use(connection, job.project_id, job.key_id, now, currency, slot_seconds=used, cost=cost)
    mine = jobs.c.id == job.id
    taken_at = connection.scalars(select(jobs.c.taken_at).where(mine)).one()
    seconds = 0.0 if taken_at is None else exact(max(0.0, now - taken_at))
    more = {
        "held_seconds": jobs.c.held_seconds + seconds,
        "slot_seconds": jobs.c.slot_seconds + used,
        "cost": jobs.c.cost + cost,
    }
    connection.execute(
        update(jobs).where(mine).values(engine_id=None, taken_at=None, ends_at=None, **more)
    )
    if joules:
        _add_energy(connection, job, joules, now)


def _add_energy(connection: Connection, job: Job, joules: float, now: float) -> None:
    """Add a seat's share of its engine's energy to the job and its project."""
    grams = co2_grams(joules, job.grams_per_kwh)
    more: dict[str, Any] = {"joules": func.coalesce(jobs.c.joules, 0.0) + joules}
    if grams is not None:
        more["co2_grams"] = func.coalesce(jobs.c.co2_grams, 0.0) + grams
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**more))
    weight = grams or 0.0
    add_use(connection, job.project_id, job.key_id, now, joules=joules, co2_grams=weight)


def _divide(
    connection: Connection, engine_id: str, now: float, joining: str | None = None
) -> dict[str, float]:
    """Divide an engine's slot-seconds since the last change among its jobs, and return what each
    has used by now.

    `joining`: job that did not sit there before. The jobs' own rows are left alone: whoever writes
    several of them at once, such as the end of a sweep, takes their locks in another order.
    """
    _lock(connection, engine_id)
    engine = connection.execute(select(engines).where(engines.c.id == engine_id)).one()
    use: dict[str, float] = dict(engine.use or {})
    if engine.ended_at is not None:
        return use
    sat = [job_id for job_id in _seated(connection, engine_id) if job_id != joining] or [_NOBODY]
    for job_id in sat:
        use[job_id] = use.get(job_id, 0.0) + exact(
            engine.ranks * max(0.0, now - engine.divided_at) / len(sat)
        )
    connection.execute(
        update(engines).where(engines.c.id == engine_id).values(use=use, divided_at=now)
    )
    return use


def _seated(connection: Connection, engine_id: str) -> list[str]:
    """Ids of an engine's jobs."""
    query = select(jobs.c.id).where(jobs.c.engine_id == engine_id).order_by(jobs.c.id)
    return list(connection.scalars(query))


def _lock(connection: Connection, engine_id: str) -> None:
    """Make transactions that change an engine's seats follow each other. SQLite's do anyway."""
    connection.execute(select(engines.c.id).where(engines.c.id == engine_id).with_for_update())
