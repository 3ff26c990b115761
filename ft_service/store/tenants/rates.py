"""Buckets of requests that several servers share: what a project may send in a minute, which fills again evenly.

A bucket is a row with the moment at which it will be full: a request moves that on by the time in which one more may be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Double, bindparam, cast, func
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.dml import ReturningInsert

from ft_service.store.database import Database, database_time
from ft_service.store.tenants.tables import request_rates

MINUTE = 60.0
"""Seconds; an empty bucket is full after them."""


@dataclass(frozen=True)
class Drawn:
    """What somebody got of a bucket."""

    taken: int
    full_after: float
    """Seconds until the bucket is full."""

    @classmethod
    def of(cls, full_after: float, per_minute: int, wanted: int, returned: int) -> Drawn:
        """Of a bucket that is full after so many seconds, `returned` put back first: as many as `wanted`, or as there are."""
        each = MINUTE / per_minute
        full_after = max(0.0, full_after - returned * each)
        taken = min(wanted, int((MINUTE - full_after) / each + 1e-6))
        return cls(taken, full_after + taken * each)


def _draw() -> ReturningInsert[Any, Any]:
    """`Drawn.of` as one statement, which others who draw wait for."""
    each, wanted = bindparam("each", type_=Double), bindparam("wanted", type_=BigInteger)
    row, now = request_rates.c, database_time()
    full_at = func.least(row.full_at, now + MINUTE)  # further off only where the clock has gone back
    full_at = func.greatest(full_at - bindparam("returned", type_=Double) * each, now)
    there = cast(func.floor((now + MINUTE - full_at) / each + 1e-6), BigInteger)
    taken = func.greatest(func.least(wanted, there), 0)
    first = {"project_id": bindparam("of_project"), "full_at": now + wanted * each, "taken": wanted}
    statement = postgresql.insert(request_rates).values(first)
    again = {"full_at": full_at + taken * each, "taken": taken}
    return statement.on_conflict_do_update(index_elements=["project_id"], set_=again).returning(row.taken, row.full_at - now)


_DRAW = _draw()


class RateStore(Database):
    """Buckets of requests."""

    def draw_requests(self, project_id: str, per_minute: int, wanted: int, returned: int) -> Drawn:
        """Take as many requests as are `wanted` of a project's bucket, or as there are, after `returned` were put back. Only on
        PostgreSQL."""
        values = {"of_project": project_id, "each": MINUTE / per_minute, "wanted": wanted, "returned": returned}
        with self.writing() as connection:
            connection.exec_driver_sql("SET LOCAL synchronous_commit = off")  # after a crash a bucket may be fuller than it was
            taken, full_after = connection.execute(_DRAW, values).one()
        return Drawn(taken, max(0.0, full_after))
