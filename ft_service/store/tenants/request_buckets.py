"""Token buckets for requests, shared by several servers: a bucket holds a project's requests per
minute and refills evenly.

A bucket is a row with the moment at which it will be full: each request moves that moment on by the
refill time of one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Double, bindparam, cast, func
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.dml import ReturningInsert

from ft_service.store.database import StorePart, database_time
from ft_service.store.tables import request_rates

MINUTE = 60.0
"""Seconds in which an empty bucket becomes full."""


@dataclass(frozen=True)
class Drawn:
    """Requests taken from a bucket."""

    taken: int
    full_after: float
    """Seconds until the bucket is full."""

    @classmethod
    def of(cls, full_after: float, per_minute: int, wanted: int, returned: int) -> Drawn:
        """Take `wanted` requests, or as many as there are, from a bucket that is full after
        `full_after` seconds, after putting `returned` back.
        """
        each = MINUTE / per_minute
        full_after = max(0.0, full_after - returned * each)
        taken = min(wanted, int((MINUTE - full_after) / each + 1e-6))
        return cls(taken, full_after + taken * each)


def _draw() -> ReturningInsert[Any, Any]:
    """`Drawn.of` as one statement, during which the row is locked."""
    each = bindparam("each", type_=Double)
    wanted = bindparam("wanted", type_=BigInteger)
    row = request_rates.c
    now = database_time()
    full_at = func.least(row.full_at, now + MINUTE)  # later only if the clock was set back
    full_at = func.greatest(full_at - bindparam("returned", type_=Double) * each, now)
    there = cast(func.floor((now + MINUTE - full_at) / each + 1e-6), BigInteger)
    taken = func.greatest(func.least(wanted, there), 0)
    first = {"project_id": bindparam("of_project"), "full_at": now + wanted * each, "taken": wanted}
    statement = postgresql.insert(request_rates).values(first)
    again = {"full_at": full_at + taken * each, "taken": taken}
    return statement.on_conflict_do_update(index_elements=["project_id"], set_=again).returning(
        row.taken, row.full_at - now
    )


_DRAW = _draw()


class BucketStore(StorePart):
    """Token buckets for requests."""

    def draw_requests(self, project_id: str, per_minute: int, wanted: int, returned: int) -> Drawn:
        """Take `wanted` requests, or as many as there are, from a project's bucket, after putting
        `returned` back. Only on PostgreSQL.
        """
        values = {
            "of_project": project_id,
            "each": MINUTE / per_minute,
            "wanted": wanted,
            "returned": returned,
        }
        with self._database.writing() as connection:
            # After a crash a bucket may be fuller than it was.
            connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
            taken, full_after = connection.execute(_DRAW, values).one()
        return Drawn(taken, max(0.0, full_after))
