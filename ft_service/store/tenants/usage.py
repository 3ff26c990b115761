"""What was used: written by the transactions that move jobs and store files, so that sums agree with these."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from ft_service.store.database import Database, upsert
from ft_service.store.records import Usage
from ft_service.store.tables import projects
from ft_service.store.tenants.tables import usage

DAY_SECONDS = 86_400
_AMOUNTS = ("slot_seconds", "tokens", "bytes", "jobs")
_GROUPS = ("project_id", "key_id")


def exact(seconds: float) -> float:
    """Seconds to the nearest 1/1024: sums of such numbers are exact in any order."""
    return round(seconds * 1024) / 1024


def add_use(
    connection: Connection,
    project_id: str,
    key_id: str | None,
    now: float,
    *,
    slot_seconds: float = 0.0,
    tokens: int = 0,
    bytes: int = 0,
    jobs: int = 0,
) -> None:
    """Count what was used on the day of `now` (database time)."""
    amounts = {"slot_seconds": slot_seconds, "tokens": tokens, "bytes": bytes, "jobs": jobs}
    statement = upsert(connection, usage).values(
        project_id=project_id, key_id=key_id or "", day=int(now // DAY_SECONDS), **amounts
    )
    more = {name: usage.c[name] + amount for name, amount in amounts.items()}
    connection.execute(statement.on_conflict_do_update(index_elements=["project_id", "key_id", "day"], set_=more))


class UsageStore(Database):
    """Use, to read."""

    def usage(
        self,
        *,
        first_day: int,
        last_day: int,
        project_ids: Sequence[str] | None = None,
        only_project: str | None = None,
        organization: str | None = None,
        key_ids: Sequence[str] | None = None,
        group_by: Sequence[str] = (),
    ) -> list[Usage]:
        """By day (from 1970-01-01, both included), and by `group_by`: some of project_id and key_id. `only_project`,
        `organization`: what the asker may see; `project_ids`, `key_ids`: what is asked for. None: all."""
        groups = [usage.c.day, *(usage.c[name] for name in _GROUPS if name in group_by)]
        query = (
            select(*groups, *(func.sum(usage.c[name]).label(name) for name in _AMOUNTS))
            .where(usage.c.day >= first_day, usage.c.day <= last_day)
            .group_by(*groups)
            .order_by(*groups)
        )
        if only_project is not None:
            query = query.where(usage.c.project_id == only_project)
        if project_ids is not None:
            query = query.where(usage.c.project_id.in_(project_ids))
        if organization is not None:
            query = query.where(usage.c.project_id.in_(select(projects.c.id).where(projects.c.organization == organization)))
        if key_ids is not None:
            query = query.where(usage.c.key_id.in_(key_ids))
        with self.reading() as connection:
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
