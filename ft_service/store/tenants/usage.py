"""Usage, written in the transactions that move jobs and store files, so that sums agree with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import Connection, func, select, update

from ft_service.jobs.queue_snapshot import accrued, remembered
from ft_service.money import cost_of
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.records import Usage
from ft_service.store.tables import LIVE, engines, jobs, projects, usage

DAY_SECONDS = 86_400
AMOUNTS = ("slot_seconds", "tokens", "bytes", "jobs", "cost", "joules", "co2_grams")


def exact(seconds: float) -> float:
    """Seconds rounded to 1/1024, so that sums are exact in any order."""
    return round(seconds * 1024) / 1024


def add_use(
    connection: Connection,
    project_id: str,
    key_id: str | None,
    now: float,
    currency: str | None = None,
    **amounts: float,
) -> None:
    """Add usage on the day of `now` (database time).

    `currency`: that of the cost; None: there is no cost. `amounts`: some of AMOUNTS.
    """
    row: dict[str, Any] = {
        "project_id": project_id,
        "key_id": key_id or "",
        "day": int(now // DAY_SECONDS),
    }
    more: dict[str, Any] = {name: usage.c[name] + amount for name, amount in amounts.items()}
    if currency is not None:
        row["currency"] = more["currency"] = currency
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


@dataclass(frozen=True)
class Spent:
    """Costs of a project in the month, what its slots have taken until now included."""

    cost: int
    """In millionths of the currency."""
    currency: str | None
    """None: nothing had a price."""
    limit: float | None
    """Its limit max_cost_per_month, in the currency; None: none."""


class UsageStore(StorePart):
    """Reading usage."""

    def usage(self, asked: UsageQuery) -> list[Usage]:
        """Usage by day, and by `asked.group_by`."""
        groups = [
            usage.c.day,
            *(usage.c[name] for name in ("project_id", "key_id") if name in asked.group_by),
        ]
        query = (
            select(
                *groups,
                *(func.sum(usage.c[name]).label(name) for name in AMOUNTS),
                func.max(usage.c.currency).label("currency"),
            )
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
                cost=int(row["cost"]),
                currency=row["currency"],
                joules=float(row["joules"]),
                co2_grams=float(row["co2_grams"]),
            )
            for row in rows
        ]

    def currency(self) -> str | None:
        """Currency of all costs in this database; None: there are none."""
        with self._database.reading() as connection:
            return connection.scalars(select(func.max(usage.c.currency))).one()

    def spent(self, project_id: str) -> Spent:
        """What a project has spent in this month (UTC), and may spend."""
        with self._database.reading() as connection:
            now = connection.scalars(select(database_time())).one()
            this_month = datetime.fromtimestamp(now, UTC).replace(day=1)
            first = (this_month.date() - date(1970, 1, 1)).days
            mine = (usage.c.project_id == project_id, usage.c.day >= first)
            booked = select(func.sum(usage.c.cost), func.max(usage.c.currency)).where(*mine)
            cost, currency = connection.execute(booked).one()
            limits = connection.scalars(
                select(projects.c.limits).where(projects.c.id == project_id)
            ).one_or_none()
            holders = select(jobs.c.price, jobs.c.currency, jobs.c.slots, jobs.c.taken_at).where(
                jobs.c.project_id == project_id,
                jobs.c.taken_at.is_not(None),
                jobs.c.engine_id.is_(None),
            )
            taken = [
                (row.currency, cost_of(row.slots * max(0.0, now - row.taken_at), row.price))
                for row in connection.execute(holders)
            ]
            shared = select(engines).where(engines.c.project_id == project_id, LIVE)
            taken += [
                (row.currency, cost_of(_engine_seconds(row, now), row.price))
                for row in connection.execute(shared)
            ]
        currency = currency or next((one for one, _ in taken if one is not None), None)
        whole = int(cost or 0) + sum(money for _, money in taken)
        return Spent(whole, currency, (limits or {}).get("max_cost_per_month"))


def _engine_seconds(engine: Any, now: float) -> float:
    """Slot-seconds of an engine that no usage holds yet. `engine`: its row."""
    since = engine.ranks * max(0.0, now - engine.divided_at)
    return sum((engine.use or {}).values(), since)
