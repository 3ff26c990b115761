"""The queue as the rows say it: what waits, what holds slots, what projects have used, and which hosts there are.

A reconciler's turn reads the first jobs of each project only, however many wait; the whole queue is read for those who ask
about their places in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Integer, RowMapping, Select, bindparam, func, literal_column, select

from ft_service.jobs.estimates import ENOUGH, Effort, Measured, Paces
from ft_service.jobs.line import Holding, Host, Line, Share, Waiting, accrued, remembered
from ft_service.jobs.states import Phase
from ft_service.store.database import Database, Direct, database_time, upsert
from ft_service.store.fleet.hosts import to_host
from ft_service.store.fleet.tables import hosts
from ft_service.store.leases import DUE
from ft_service.store.rows import shapes_of
from ft_service.store.tables import MEASURED, QUEUED, jobs, projects, slots

OF_EACH_PROJECT = 16
"""Waiting jobs of a project that a reconciler's turn looks at: one to start, the others to fill a gap."""
HOST_SECONDS = 60.0
"""How long a host counts after it was last told of."""
_MEASURED_JOBS = 200
"""Newest jobs by which others are estimated."""

_EFFORT = [jobs.c[name] for name in ("base", "slots", "work", "planned_seconds", "left_seconds")]
_WAITING = [
    jobs.c[name]
    for name in ("id", "project_id", "position", "priority", "not_before", "host", "pending", "nodes", "shapes", "memory")
]


def _projects_in_queue() -> Select[tuple[str | None]]:
    """Each project that has queued jobs, by one step of the index: their number does not count."""
    first = select(func.min(jobs.c.project_id).label("project")).where(QUEUED).cte("waiting", recursive=True)
    following = select(func.min(jobs.c.project_id)).where(QUEUED, jobs.c.project_id > first.c.project).scalar_subquery()
    found = first.union_all(select(following).where(first.c.project.is_not(None)))
    return select(found.c.project).where(found.c.project.is_not(None))


# Built once: to put such statements together takes longer than to run them.
_PROJECTS = _projects_in_queue()
_FIRST_OF_PROJECT = Direct(
    select(*_WAITING, *_EFFORT)
    .where(DUE, jobs.c.project_id == bindparam("of_project"))
    .order_by(jobs.c.priority.desc(), jobs.c.position)
    .limit(bindparam("most", type_=Integer))
    .offset(bindparam("none", type_=Integer))
)
_FIRST_COLUMNS = [column.name for column in (*_WAITING, *_EFFORT)]
_HOLDINGS = (
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
    .group_by(slots.c.host, jobs.c.id, jobs.c.project_id, jobs.c.priority, jobs.c.ends_at, jobs.c.phase)
)
_MEASURED = (
    select(*_EFFORT, jobs.c.held_seconds, jobs.c.slot_seconds)
    .where(MEASURED)
    .order_by(jobs.c.finished_at.desc())
    .limit(_MEASURED_JOBS)
)
_UNDER_WAY = (
    select(
        *_EFFORT,
        (jobs.c.held_seconds + jobs.c.ends_at - jobs.c.taken_at).label("held_seconds"),
        (jobs.c.slot_seconds + jobs.c.slots * (jobs.c.ends_at - jobs.c.taken_at)).label("slot_seconds"),
    )
    .where(jobs.c.phase == literal_column(f"'{Phase.TRAINING.value}'"), jobs.c.left_seconds.is_not(None))
    .where(jobs.c.ends_at.is_not(None), jobs.c.taken_at.is_not(None))
    .limit(_MEASURED_JOBS)
)
_SHARES = select(projects.c.id, projects.c.used, projects.c.used_at, projects.c.max_slots)


class QueueStore(Database):
    """What the queue's decisions go by."""

    def tell_host(self, host: str, total: int) -> None:
        """A host is there, and has so many slots. To be repeated well within HOST_SECONDS."""
        row = {"host": host, "slots": total, "seen_at": database_time()}
        with self.writing() as connection:
            statement = upsert(connection, hosts).values(row)
            connection.execute(statement.on_conflict_do_update(index_elements=["host"], set_=row))

    def line_for(self, place: str, there: Mapping[str, Host], paces: Paces) -> Line:
        """What may start in a place, on the hosts that are there: of each project the first jobs that are due and that nobody
        is about to move."""
        with self.reading() as connection:
            waiting_projects = connection.scalars(_PROJECTS).all()
            now, holdings, shares = _present(connection)
        waiting: list[Waiting] = []
        total = sum(host.slots for host in there.values())
        values = {"for_host": place, "host_slots": total, "most": OF_EACH_PROJECT, "none": 0}
        with self.driving(write=False) as driver:
            for project in waiting_projects:
                rows = _FIRST_OF_PROJECT.run(driver, {**values, "of_project": project})
                waiting += [_waiting(dict(zip(_FIRST_COLUMNS, row, strict=True)), paces) for row in rows]
        return Line(now=now, hosts=there, waiting=waiting, holdings=holdings, shares=shares)

    def whole_line(self, paces: Paces) -> Line:
        """Everything that waits, and every host that was told of lately."""
        query = select(*_WAITING, *_EFFORT).where(QUEUED).order_by(jobs.c.position)
        with self.reading() as connection:
            now, holdings, shares = _present(connection)
            lately = (hosts.c.seen_at.between(now - HOST_SECONDS, now + HOST_SECONDS), hosts.c.drained_at.is_(None))
            silent = (now - hosts.c.seen_at).label("silent")
            rows = connection.execute(select(hosts, silent).where(*lately)).mappings().all()
            waiting = [_waiting(row, paces) for row in connection.execute(query).mappings()]
        there = {row["host"]: _host(row) for row in rows}
        return Line(now=now, hosts=there, waiting=waiting, holdings=holdings, shares=shares)

    def measured_jobs(self) -> list[Measured]:
        """The jobs that have succeeded last, with what they were planned to take and took; while there are few, also those that
        train, with what they will have taken, as their steps tell."""
        with self.reading() as connection:
            rows = list(connection.execute(_MEASURED).mappings())
            if len(rows) < ENOUGH:  # those that train do not know yet how long their end takes
                rows += connection.execute(_UNDER_WAY).mappings()
        return [Measured(_effort(row), row["held_seconds"], row["slot_seconds"]) for row in rows if row["held_seconds"]]


def _host(row: RowMapping) -> Host:
    return Host(slots=row["slots"]) if row["place"] is None else to_host(row).in_queue()


def _present(connection: Connection) -> tuple[float, list[Holding], dict[str, Share]]:
    """Database time, what holds slots, and every project's part in the queue."""
    now = connection.scalars(select(database_time())).one()
    rows = connection.execute(_HOLDINGS).mappings().all()
    return now, [_holding(row, now) for row in rows], _shares(connection, rows, now)


def _shares(connection: Connection, holding: Sequence[RowMapping], now: float) -> dict[str, Share]:
    running: dict[str, float] = defaultdict(float)
    for row in holding:
        running[row["project_id"]] += accrued(row["held"], now - (row["since"] or now))
    return {
        row.id: Share(used=remembered(row.used, now - row.used_at) + running[row.id], max_slots=row.max_slots)
        for row in connection.execute(_SHARES)
    }


def _holding(row: RowMapping, now: float) -> Holding:
    return Holding(
        id=row["id"],
        project=row["project_id"],
        host=row["host"],
        slots=row["held"],
        priority=row["priority"],
        ends_at=row["ends_at"],
        taken_at=row["since"] or now,
        movable=row["phase"] == Phase.TRAINING.value,
        halting=row["phase"] == Phase.STOPPING.value,
    )


def _waiting(row: RowMapping | dict[str, Any], paces: Paces) -> Waiting:
    return Waiting(
        id=row["id"],
        project=row["project_id"],
        number=row["position"],
        slots=row["slots"],
        nodes=row["nodes"] or 1,
        shapes=shapes_of(row["shapes"]),
        memory=row["memory"],
        priority=row["priority"],
        seconds=paces.expected_seconds(_effort(row)),
        not_before=row["not_before"],
        host=row["host"],
        note=row["pending"],
    )


def _effort(row: RowMapping | dict[str, Any]) -> Effort:
    return Effort(row["base"] or "", row["slots"], row["work"], row["planned_seconds"], row["left_seconds"])
