"""The table of sweeps, and the index by which their jobs are found (ft_service/store/tables.py)."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Integer, Table

from ft_service.store.database import StorableJson, StorableText
from ft_service.store.tables import jobs, metadata

sweeps = Table(
    "sweeps",
    metadata,
    Column("position", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", StorableText, nullable=False, unique=True),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    # The create body.
    Column("request", StorableJson, nullable=False),
    # How its values were chosen, and when it stops a job.
    Column("settings", StorableJson, nullable=False),
    Column("cancelled_at", Double),
    # Once all its jobs are over.
    Column("finished_at", Double),
    # The best job, once finished; NULL: none has succeeded.
    Column("best_job", StorableText),
    Column("deleted_at", Double),
    sqlite_autoincrement=True,
)
UNFINISHED_SWEEP = sweeps.c.finished_at.is_(None)
OF_SWEEPS = jobs.c.sweep_id.is_not(None)
Index(None, sweeps.c.project_id, sweeps.c.position)
Index("ix_sweeps_unfinished", sweeps.c.position, sqlite_where=UNFINISHED_SWEEP, postgresql_where=UNFINISHED_SWEEP)
Index("ix_jobs_sweep", jobs.c.sweep_id, jobs.c.position, sqlite_where=OF_SWEEPS, postgresql_where=OF_SWEEPS)
