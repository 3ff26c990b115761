"""Integrations of jobs: where else their metrics are sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

UNDELIVERED = sa.text("finished_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "integrations",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_integrations_job_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_integrations_project_id")),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_integrations")),
    )
    op.create_index(
        "ix_integrations_undelivered",
        "integrations",
        ["next_try_at"],
        sqlite_where=UNDELIVERED,
        postgresql_where=UNDELIVERED,
    )


def downgrade() -> None:
    op.drop_table("integrations")
