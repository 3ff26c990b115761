"""Counts for those who run the service. Each is one statement that an index answers."""

from __future__ import annotations

from sqlalchemy import func, select

from ft_service.store.database import Database, database_time
from ft_service.store.records import Statistics
from ft_service.store.tables import NEEDS_ATTENTION, QUEUED, UNSENT, files, jobs, slots, webhook_deliveries


class StatisticsStore(Database):
    """Counts."""

    def statistics(self) -> Statistics:
        """Counts over all projects, as they are now."""
        by_state = select(jobs.c.state, func.coalesce(jobs.c.reason, ""), func.count()).group_by(jobs.c.reason, jobs.c.state)
        by_host = select(slots.c.host, func.count()).group_by(slots.c.host)
        waiting = select(database_time() - func.min(jobs.c.queued_at)).where(QUEUED)
        overdue = select(database_time() - func.min(jobs.c.looked_at)).where(NEEDS_ATTENTION, jobs.c.looked_at > 0)
        kept = select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.freed_at.is_(None))
        unsent = select(func.count()).select_from(webhook_deliveries).where(UNSENT)
        with self.reading() as connection:
            return Statistics(
                jobs={(state, reason): count for state, reason, count in connection.execute(by_state)},
                oldest_queued_seconds=max(0.0, connection.scalars(waiting).one() or 0.0),
                overdue_seconds=max(0.0, connection.scalars(overdue).one() or 0.0),
                slots_in_use={row[0]: row[1] for row in connection.execute(by_host)},
                file_bytes=int(connection.scalars(kept).one()),
                webhooks_waiting=connection.scalars(unsent).one(),
            )
