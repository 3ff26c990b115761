"""Usage, written in the transactions that move jobs and store files, so that sums agree with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, update

from ft_service.jobs.queue_snapshot import accrued, remembered
from ft_service.store.database import StorePart, upsert
from ft_service.store.records import Usage
from ft_service.store.tables import projects, usage

DAY_SECONDS = 86_400
AMOUNTS = ("slot_seconds", "tokens", "bytes", "jobs")


def exact(seconds: float) -> float:
    """Seconds rounded to 1/1024, so that sums are exact in any order."""
    return round(seconds * 1024) / 1024


def add_use(
    connection: Connection, project_id: str, key_id: str | None, now: float, **amounts: float
) -> None:
    """Add usage on the day of `now` (database time).

    `amounts`: slot_seconds, tokens, bytes or jobs.
    """
    row = {"project_id": project_id, "key_id": key_id or "", "day": int(now // DAY_SECONDS)}
    more = {name: usage.c[name] + amount for name, amount in amounts.items()}
    statement = upsert(connection, usage).values(**row, **dict.fromkeys(AMOUNTS, 0) | amounts)
    connection.execute(
        statement.on_conflict_do_update(index_elements=["project_id", "key_id", "day"], set_=more)
    )


def add_to_share(
    connection: Connection, project_id: str, slots: int, seconds: float, now: float
) -> None:
    """Add slots that were held for the last `seconds` to what a project has used, by which the
    queue orders projects.
    """
    project = projects.c.id == project_id
    query = (
        select(projects.c.used, projects.c.used_at).where(project).with_for_update(key_share=True)
    )
    before = connection.execute(query).one()
    total = remembered(before.used, now - before.used_at) + accrued(slots, seconds)
    connection.execute(update(projects).where(project).values(used=total, used_at=now))


@dataclass(frozen=True, kw_only=True)
class UsageQuery:
    """The usage to read. Filters that are None leave out nothing."""

    first_day: int
    """Days since 1970-01-01, both included."""
    last_day: int
    project_ids: Sequence[str] | None = None
    key_ids: Sequence[str] | None = None
    only_project: str | None = None
    """The only project that the client may see."""
    organization: str | None = None
    """The only organization that the client may see."""
    group_by: Sequence[str] = ()
    """Some of project_id and key_id; usage is always grouped by day."""


class UsageStore(StorePart):
    """Reading usage."""

    def usage(self, asked: UsageQuery) -> list[Usage]:
        """Usage by day, and by `asked.group_by`."""
        groups = [
            usage.c.day,
            *(usage.c[name] for name in ("project_id", "key_id") if name in asked.group_by),
        ]
        query = (
            select(*groups, *(func.sum(usage.c[name]).label(name) for name in AMOUNTS))
            .where(usage.c.day >= asked.first_day, usage.c.day <= asked.last_day)
            .group_by(*groups)
            .order_by(*groups)
        )
        if asked.only_project is not None:
            query = query.where(usage.c.project_id == asked.only_project)
        if asked.project_ids is not None:
            query = query.where(usage.c.project_id.in_(asked.project_ids))
        if asked.organization is not None:
            mine = select(projects.c.id).where(projects.c.organization == asked.organization)
            query = query.where(usage.c.project_id.in_(mine))
        if asked.key_ids is not None:
            query = query.where(usage.c.key_id.in_(asked.key_ids))
        with self._database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            Usage(
                day=row["day"],
                project_id=row.get("project_id"),
                key_id=row.get("key_id"),
                slot_seconds=float(row["slot_seconds"]),
                tokens=int(row["tokens"]),
                bytes=int(row["bytes"]),
                jobs=int(row["jobs"]),
            )
            for row in rows
        ]
