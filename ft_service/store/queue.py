"""Snapshots of the queue: waiting jobs, running jobs, the use of each project, and the known hosts.

A reconciler's turn reads only the first jobs of each project, however many wait; forecasts read the
whole queue.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    FromClause,
    RowMapping,
    Select,
    bindparam,
    func,
    literal_column,
    or_,
    select,
    true,
)

from ft_service.jobs.estimates import ENOUGH, Effort, MeasuredJob, Paces
from ft_service.jobs.queue_snapshot import (
    Host,
    LiveEngine,
    QueuedJob,
    QueueSnapshot,
    RunningJob,
    Share,
    Sharing,
    accrued,
    remembered,
)
from ft_service.jobs.states import ALONE, Phase, State
from ft_service.rundir.engine import SeatSize
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.leases import DUE, HOST_SECONDS
from ft_service.store.rows import seat_of, shapes_of
from ft_service.store.tables import (
    LIVE,
    MEASURED,
    NEEDS_ATTENTION,
    QUEUED,
    SEATED,
    engines,
    hosts,
    jobs,
    projects,
    slots,
)

OF_EACH_PROJECT = 16
"""Waiting jobs of a project that a reconciler's turn reads: one to start, and others for slots that
it cannot use.
"""
_MEASURED_JOBS = 200
"""Number of newest jobs from which durations of others are estimated."""

_EFFORT = ("base", "slots", "work", "planned_seconds", "left_seconds")
_OF_WAITING = (
    "id",
    "project_id",
    "position",
    "priority",
    "not_before",
    "host",
    "pending",
    "nodes",
    "shapes",
)
_OF_SHARING = ("share_key", "fault_group", "sweep_id", "seat")


def _columns_of_waiting(table: FromClause) -> list[ColumnElement[Any]]:
    method = table.c.request["method"]["type"].as_string().label("method")
    return [*(table.c[name] for name in (*_OF_WAITING, *_OF_SHARING, *_EFFORT)), method]


def _projects_in_queue() -> CTE:
    """Return a query of the projects with queued jobs, and NULL.

    Each takes one step in the index, whatever the number of its jobs.
    """
    first = (
        select(func.min(jobs.c.project_id).label("project"))
        .where(QUEUED)
        .cte("waiting", recursive=True)
    )
    following = (
        select(func.min(jobs.c.project_id))
        .where(QUEUED, jobs.c.project_id > first.c.project)
        .scalar_subquery()
    )
    return first.union_all(select(following).where(first.c.project.is_not(None)))


def _first_of_each_project(*, lateral: bool) -> Select[Any]:
    """Return a query of the first due jobs of each project: for each, one step to the project in
    the index of its queue. `lateral`: for PostgreSQL, which would compare a list of each project's
    with all jobs; SQLite knows no other way.
    """
    in_queue = _projects_in_queue()
    job = jobs.alias("job")
    may_have = or_(
        projects.c.max_slots.is_(None),
        jobs.c.slots <= projects.c.max_slots,
        projects.c.id.in_(bindparam("unlimited", expanding=True)),
    )
    first = (
        select(jobs.c.position)
        .where(DUE, jobs.c.project_id == projects.c.id, may_have)
        .order_by(jobs.c.priority.desc(), jobs.c.position)
        .limit(OF_EACH_PROJECT)
        .correlate(projects)
    )
    waiting = in_queue.join(projects, projects.c.id == in_queue.c.project)
    if lateral:
        position = first.lateral("first")
        waiting = waiting.join(position, true()).join(job, job.c.position == position.c.position)
    else:
        waiting = waiting.join(job, job.c.position.in_(first))
    return select(*_columns_of_waiting(job)).select_from(waiting)


_FIRST_OF_EACH_PROJECT = {
    "postgresql": _first_of_each_project(lateral=True),
    "sqlite": _first_of_each_project(lateral=False),
}
_EFFORTS = [jobs.c[name] for name in _EFFORT]
_RUNNING = (
    select(
        slots.c.host,
        func.count().label("held"),
        func.min(slots.c.taken_at).label("since"),
        jobs.c.id,
        jobs.c.project_id,
        jobs.c.priority,
        jobs.c.ends_at,
        jobs.c.phase,
    )
    .join(jobs, jobs.c.id == slots.c.job_id)
    .where(slots.c.engine_id.is_(None))
    .group_by(
        slots.c.host, jobs.c.id, jobs.c.project_id, jobs.c.priority, jobs.c.ends_at, jobs.c.phase
    )
)
_MEASURED = (
    select(*_EFFORTS, jobs.c.held_seconds, jobs.c.slot_seconds)
    .where(MEASURED)
    .order_by(jobs.c.finished_at.desc())
    .limit(_MEASURED_JOBS)
)
_UNDER_WAY = (
    select(
        *_EFFORTS,
        (jobs.c.held_seconds + jobs.c.ends_at - jobs.c.taken_at).label("held_seconds"),
        (jobs.c.slot_seconds + jobs.c.slots * (jobs.c.ends_at - jobs.c.taken_at)).label(
            "slot_seconds"
        ),
    )
    .where(
        jobs.c.phase == literal_column(f"'{Phase.TRAINING.value}'"),
        jobs.c.left_seconds.is_not(None),
    )
    .where(jobs.c.ends_at.is_not(None), jobs.c.taken_at.is_not(None), jobs.c.engine_id.is_(None))
    .limit(_MEASURED_JOBS)
)
_ENGINES = select(
    engines,
    *(
        select(value).where(jobs.c.engine_id == engines.c.id).scalar_subquery().label(name)
        for name, value in {
            "seats": func.count(),
            "unknown": func.count() - func.count(jobs.c.ends_at),
            "ends_at": func.max(jobs.c.ends_at),
            "priority": func.coalesce(func.max(jobs.c.priority), 0),
        }.items()
    ),
).where(LIVE)
_SEATS = select(jobs.c.engine_id, jobs.c.seat).where(SEATED)
_COMPANIONS = select(
    jobs.c.project_id, jobs.c.share_key, jobs.c.fault_group, func.count().label("number")
).where(or_(QUEUED, NEEDS_ATTENTION), jobs.c.share_key.is_not(None))
_VALIDATING = (
    select(jobs.c.sweep_id, func.count().label("number"))
    .where(NEEDS_ATTENTION, jobs.c.state == State.VALIDATING.value, jobs.c.sweep_id.is_not(None))
    .group_by(jobs.c.sweep_id)
)
_SHARES = select(projects.c.id, projects.c.used, projects.c.used_at, projects.c.max_slots)


class QueueStore(StorePart):
    """Snapshots of the queue, and hosts."""

    def announce_host(self, host: str, total: int) -> None:
        """Note that a host is alive and has so many slots. Repeat it well within HOST_SECONDS."""
        row = {"host": host, "slots": total, "seen_at": database_time()}
        with self._database.writing() as connection:
            statement = upsert(connection, hosts).values(row)
            connection.execute(statement.on_conflict_do_update(index_elements=["host"], set_=row))

    def silent_hosts(self) -> list[str]:
        """Hosts whose last announcement is longer ago than they count."""
        lately = hosts.c.seen_at.between(
            database_time() - HOST_SECONDS, database_time() + HOST_SECONDS
        )
        with self._database.reading() as connection:
            return list(
                connection.scalars(select(hosts.c.host).where(~lately).order_by(hosts.c.host))
            )

    def snapshot_for(
        self, name: str, host: Host, paces: Paces, *, new_engines: bool = False
    ) -> QueueSnapshot:
        """Return the first due jobs of each project that may start on a host and are not claimed;
        without those that need more slots than their project may have, which would hide the jobs
        behind them. `new_engines`: whether jobs may start engines there, and join them.
        """
        with self._database.reading() as connection:
            now, running, shares, live = _read_running(connection)
            unlimited = _within_limits({engine.sharing.project for engine in live}, running, shares)
            first = _FIRST_OF_EACH_PROJECT[connection.dialect.name]
            rows = connection.execute(
                first, {"for_host": name, "host_slots": host.slots, "unlimited": unlimited}
            ).mappings()
            waiting = [_waiting(row, paces) for row in rows]
            if new_engines and any(job.sharing is not None for job in waiting):
                waiting = _with_company(connection, waiting)
        return QueueSnapshot(
            now=now,
            hosts={name: host},
            waiting=waiting,
            running=running,
            shares=shares,
            engines=[engine for engine in live if engine.host == name] if new_engines else [],
            new_engines=new_engines,
        )

    def snapshot(self, paces: Paces) -> QueueSnapshot:
        """Return all waiting jobs and all hosts that were announced recently."""
        query = select(*_columns_of_waiting(jobs)).where(QUEUED).order_by(jobs.c.position)
        with self._database.reading() as connection:
            now, running, shares, live = _read_running(connection)
            lately = hosts.c.seen_at.between(now - HOST_SECONDS, now + HOST_SECONDS)
            announced = connection.execute(select(hosts).where(lately).order_by(hosts.c.host))
            known = {row.host: Host(slots=row.slots) for row in announced}
            waiting = [_waiting(row, paces) for row in connection.execute(query).mappings()]
        return QueueSnapshot(
            now=now, hosts=known, waiting=waiting, running=running, shares=shares, engines=live
        )

    def measured_jobs(self) -> list[MeasuredJob]:
        """Return the newest succeeded jobs with their planned and real durations; if there are few,
        also running jobs with their expected durations.
        """
        with self._database.reading() as connection:
            rows = list(connection.execute(_MEASURED).mappings())
            if len(rows) < ENOUGH:  # less exact: the time after the last step is unknown
                rows += connection.execute(_UNDER_WAY).mappings()
        return [
            MeasuredJob(_effort(row), row["held_seconds"], row["slot_seconds"])
            for row in rows
            if row["held_seconds"]
        ]


def _within_limits(
    sharing: set[str], running: Sequence[RunningJob], shares: Mapping[str, Share]
) -> list[str]:
    """Of the projects with live engines, whose jobs may need no slots, those that hold no more than
    they may.
    """
    held = Counter[str]()
    for job in running:
        held[job.project] += job.slots
    limits = {project: shares[project].max_slots for project in sharing if project in shares}
    return sorted(
        project for project, limit in limits.items() if limit is None or held[project] <= limit
    )


_Running = tuple[float, list[RunningJob], dict[str, Share], list[LiveEngine]]


def _read_running(connection: Connection) -> _Running:
    """Return database time, the running jobs and engines as holders of slots, every project's
    share, and the engines.
    """
    now = connection.scalars(select(database_time())).one()
    rows = connection.execute(_RUNNING).mappings().all()
    live = connection.execute(_ENGINES).mappings().all()
    used_now: dict[str, float] = defaultdict(float)
    for row in rows:
        used_now[row["project_id"]] += accrued(row["held"], now - row["since"])
    for row in live:
        used_now[row["project_id"]] += accrued(row["ranks"], now - row["created_at"])
    shares = {
        row.id: Share(
            used=remembered(row.used, now - row.used_at) + used_now[row.id], max_slots=row.max_slots
        )
        for row in connection.execute(_SHARES)
    }
    seats: dict[str, list[SeatSize | None]] = defaultdict(list)
    for engine_id, seat in connection.execute(_SEATS) if live else ():
        seats[engine_id].append(seat_of(seat))
    engines_now = [_live_engine(row, now, seats[row["id"]]) for row in live]
    running = [_running_job(row) for row in rows] + list(map(_running_engine, engines_now, live))
    return now, running, shares, engines_now


def _with_company(connection: Connection, waiting: Sequence[QueuedJob]) -> list[QueuedJob]:
    """The jobs with `company`: waiting and running jobs that share, and those of the same sweep
    that are still validated.
    """
    grouped = _COMPANIONS.group_by(jobs.c.project_id, jobs.c.share_key, jobs.c.fault_group)
    number = {Sharing(*row[:3]): row.number for row in connection.execute(grouped)}
    validated = {row.sweep_id: row.number for row in connection.execute(_VALIDATING)}
    return [
        job
        if job.sharing is None
        else replace(
            job,
            company=number.get(job.sharing, 1)
            - 1
            + (validated.get(job.sweep, 0) if job.sweep else 0),
        )
        for job in waiting
    ]


def _running_engine(engine: LiveEngine, row: RowMapping) -> RunningJob:
    return RunningJob(
        id=engine.id,
        project=row["project_id"],
        host=engine.host,
        slots=engine.slots,
        priority=row["priority"],
        ends_at=engine.ends_at,
        taken_at=row["created_at"],
        preemptible=not engine.closing,
        stopping=engine.closing,
    )


def _live_engine(row: RowMapping, now: float, sizes: Sequence[SeatSize | None]) -> LiveEngine:
    return LiveEngine(
        id=row["id"],
        host=row["host"],
        slots=row["ranks"],
        sharing=Sharing(row["project_id"], row["share_key"], row["fault_group"]),
        seats=row["seats"],
        most_seats=row["most_seats"],
        sizes=sizes,
        room=row["room"],
        closing=row["closing_at"] is not None,
        ends_at=None if row["unknown"] else row["ends_at"] or now,
    )


def _running_job(row: RowMapping) -> RunningJob:
    return RunningJob(
        id=row["id"],
        project=row["project_id"],
        host=row["host"],
        slots=row["held"],
        priority=row["priority"],
        ends_at=row["ends_at"],
        taken_at=row["since"],
        preemptible=row["phase"] == Phase.TRAINING.value,
        stopping=row["phase"] == Phase.STOPPING.value,
    )


def _waiting(row: RowMapping, paces: Paces) -> QueuedJob:
    return QueuedJob(
        id=row["id"],
        project=row["project_id"],
        number=row["position"],
        slots=row["slots"],
        nodes=row["nodes"],
        shapes=shapes_of(row["shapes"]),
        priority=row["priority"],
        seconds=paces.expected_seconds(_effort(row)),
        not_before=row["not_before"],
        host=row["host"],
        note=row["pending"],
        sharing=_sharing(row),
        by_client=row["method"] == "tinker",
        seat=seat_of(row["seat"]),
        sweep=row["sweep_id"],
    )


def _sharing(row: RowMapping) -> Sharing | None:
    if row["share_key"] is None or row["fault_group"] == ALONE:
        return None
    return Sharing(row["project_id"], row["share_key"], row["fault_group"])


def _effort(row: RowMapping) -> Effort:
    return Effort(
        row["base"], row["slots"], row["work"], row["planned_seconds"], row["left_seconds"]
    )
