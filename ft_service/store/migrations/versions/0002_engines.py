"""Add engines, and which jobs share them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "engines",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("share_key", sa.Text(), nullable=False),
        sa.Column("fault_group", sa.Text(), nullable=True),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("most_seats", sa.Integer(), nullable=False),
        sa.Column("room", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("use", sa.JSON(), nullable=True),
        sa.Column("divided_at", sa.Double(), nullable=False),
        sa.Column("closing_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_engines_project_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_engines")),
    )
    op.create_index(
        "ix_engines_live",
        "engines",
        ["host"],
        unique=False,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.add_column("jobs", sa.Column("share_key", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("seat", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("engine_id", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("fault_group", sa.Text(), nullable=True))
    op.create_index(
        "ix_jobs_engine",
        "jobs",
        ["engine_id"],
        unique=False,
        sqlite_where=sa.text("engine_id IS NOT NULL"),
        postgresql_where=sa.text("engine_id IS NOT NULL"),
    )
    op.add_column("slots", sa.Column("engine_id", sa.Text(), nullable=True))
