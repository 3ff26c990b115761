"""Add when jobs and projects were deleted, and what of them is erased."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("deleted_models", sa.Column("erased_at", sa.Double(), nullable=True))
    op.create_index(
        "ix_deleted_models_erased",
        "deleted_models",
        ["erased_at"],
        unique=False,
        sqlite_where=sa.text("erased_at IS NOT NULL"),
        postgresql_where=sa.text("erased_at IS NOT NULL"),
    )
    op.add_column("jobs", sa.Column("deleted_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("trimmed_at", sa.Double(), nullable=True))
    op.create_index(
        "ix_jobs_deleted",
        "jobs",
        ["position"],
        unique=False,
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_ended",
        "jobs",
        ["finished_at"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NOT NULL AND deleted_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL AND deleted_at IS NULL"),
    )
    op.create_index(
        "ix_jobs_untrimmed",
        "jobs",
        ["finished_at"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NOT NULL AND trimmed_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL AND trimmed_at IS NULL"),
    )
    op.add_column("projects", sa.Column("deleted_at", sa.Double(), nullable=True))
    op.add_column("projects", sa.Column("erased_at", sa.Double(), nullable=True))
