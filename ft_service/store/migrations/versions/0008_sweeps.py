"""Sweeps, and their jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

OF_JOBS = (("sweep_id", sa.Text()), ("sweep_values", sa.JSON()), ("sweep_course", sa.JSON()), ("stopped", sa.Text()))


def upgrade() -> None:
    for name, kind in OF_JOBS:
        op.add_column("jobs", sa.Column(name, kind, nullable=True))
    op.create_table(
        "sweeps",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("cancelled_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("best_job", sa.Text(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_sweeps_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_sweeps")),
        sa.UniqueConstraint("id", name=op.f("uq_sweeps_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_sweeps_project_id_position"), "sweeps", ["project_id", "position"])
    unfinished, of_sweeps = sa.text("finished_at IS NULL"), sa.text("sweep_id IS NOT NULL")
    op.create_index("ix_sweeps_unfinished", "sweeps", ["position"], sqlite_where=unfinished, postgresql_where=unfinished)
    op.create_index("ix_jobs_sweep", "jobs", ["sweep_id", "position"], sqlite_where=of_sweeps, postgresql_where=of_sweeps)


def downgrade() -> None:
    op.drop_index("ix_jobs_sweep", "jobs")
    op.drop_table("sweeps")
    for name, _ in reversed(OF_JOBS):
        op.drop_column("jobs", name)
