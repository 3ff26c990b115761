"""Snapshots of the queue: waiting jobs, running jobs, the use of each project, and the known hosts.

A reconciler's turn reads only the first jobs of each project, however many wait; forecasts read the whole queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping, Select, bindparam, func, literal_column, select

from ft_service.jobs.estimates import ENOUGH, Effort, MeasuredJob, Paces
from ft_service.jobs.queue_snapshot import Host, QueuedJob, QueueSnapshot, RunningJob, Share, accrued, remembered
from ft_service.jobs.states import Phase
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.leases import DUE
from ft_service.store.rows import shapes_of
from ft_service.store.tables import MEASURED, QUEUED, hosts, jobs, projects, slots

OF_EACH_PROJECT = 16
"""Waiting jobs of a project that a reconciler's turn reads: one to start, and others for slots that it cannot use."""
HOST_SECONDS = 60.0
"""Time after its last announcement for which a host counts."""
_MEASURED_JOBS = 200
"""Number of newest jobs from which durations of others are estimated."""

_EFFORT = [jobs.c[name] for name in ("base", "slots", "work", "planned_seconds", "left_seconds")]
_WAITING = [
    jobs.c[name] for name in ("id", "project_id", "position", "priority", "not_before", "host", "pending", "nodes", "shapes")
]


def _projects_in_queue() -> Select[tuple[str | None]]:
    """Return a query of the projects with queued jobs. Each takes one step in the index, whatever the number of its jobs."""
    first = select(func.min(jobs.c.project_id).label("project")).where(QUEUED).cte("waiting", recursive=True)
    following = select(func.min(jobs.c.project_id)).where(QUEUED, jobs.c.project_id > first.c.project).scalar_subquery()
    in_queue = first.union_all(select(following).where(first.c.project.is_not(None)))
    return select(in_queue.c.project).where(in_queue.c.project.is_not(None))


_PROJECTS = _projects_in_queue()
_FIRST_OF_PROJECT = (
    select(*_WAITING, *_EFFORT)
    .where(DUE, jobs.c.project_id == bindparam("of_project"))
    .order_by(jobs.c.priority.desc(), jobs.c.position)
    .limit(OF_EACH_PROJECT)
)
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


class QueueStore(StorePart):
    """Snapshots of the queue, and hosts."""

    def announce_host(self, host: str, total: int) -> None:
        """Note that a host is alive and has so many slots. Repeat it well within HOST_SECONDS."""
        row = {"host": host, "slots": total, "seen_at": database_time()}
        with self._database.writing() as connection:
            statement = upsert(connection, hosts).values(row)
            connection.execute(statement.on_conflict_do_update(index_elements=["host"], set_=row))

    def snapshot_for(self, name: str, host: Host, paces: Paces) -> QueueSnapshot:
        """Return the first due jobs of each project that may start on a host and are not claimed."""
        values = {"for_host": name, "host_slots": host.slots}
        waiting: list[QueuedJob] = []
        with self._database.reading() as connection:
            now, running, shares = _read_running(connection)
            for project in connection.scalars(_PROJECTS).all():
                rows = connection.execute(_FIRST_OF_PROJECT, {**values, "of_project": project}).mappings()
                waiting += [_waiting(row, paces) for row in rows]
        return QueueSnapshot(now=now, hosts={name: host}, waiting=waiting, running=running, shares=shares)

    def snapshot(self, paces: Paces) -> QueueSnapshot:
        """Return all waiting jobs and all hosts that were announced recently."""
        query = select(*_WAITING, *_EFFORT).where(QUEUED).order_by(jobs.c.position)
        with self._database.reading() as connection:
            now, running, shares = _read_running(connection)
            lately = hosts.c.seen_at.between(now - HOST_SECONDS, now + HOST_SECONDS)
            known = {row.host: Host(slots=row.slots) for row in connection.execute(select(hosts).where(lately))}
            waiting = [_waiting(row, paces) for row in connection.execute(query).mappings()]
        return QueueSnapshot(now=now, hosts=known, waiting=waiting, running=running, shares=shares)

    def measured_jobs(self) -> list[MeasuredJob]:
        """Return the newest succeeded jobs with their planned and real durations; if there are few, also running jobs with
        their expected durations."""
        with self._database.reading() as connection:
            rows = list(connection.execute(_MEASURED).mappings())
            if len(rows) < ENOUGH:  # less exact: the time after the last step is unknown
                rows += connection.execute(_UNDER_WAY).mappings()
        return [MeasuredJob(_effort(row), row["held_seconds"], row["slot_seconds"]) for row in rows if row["held_seconds"]]


def _read_running(connection: Connection) -> tuple[float, list[RunningJob], dict[str, Share]]:
    """Return database time, the running jobs, and every project's share."""
    now = connection.scalars(select(database_time())).one()
    rows = connection.execute(_RUNNING).mappings().all()
    return now, [_running_job(row) for row in rows], _shares(connection, rows, now)


def _shares(connection: Connection, holders: Sequence[RowMapping], now: float) -> dict[str, Share]:
    used_now: dict[str, float] = defaultdict(float)
    for row in holders:
        used_now[row["project_id"]] += accrued(row["held"], now - row["since"])
    return {
        row.id: Share(used=remembered(row.used, now - row.used_at) + used_now[row.id], max_slots=row.max_slots)
        for row in connection.execute(_SHARES)
    }


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
    )


def _effort(row: RowMapping) -> Effort:
    return Effort(row["base"], row["slots"], row["work"], row["planned_seconds"], row["left_seconds"])
