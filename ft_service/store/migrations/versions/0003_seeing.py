"""What is needed to see the service and to search it: why and since when a job waits, jobs by state, and metadata by pair."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

BATCH = 1000
JOBS = sa.table("jobs", sa.column("position", sa.BigInteger), sa.column("project_id", sa.Text), sa.column("request", sa.JSON))
PAIRS = sa.table(
    "job_metadata",
    sa.column("job_position", sa.BigInteger),
    sa.column("key", sa.Text),
    sa.column("value", sa.Text),
    sa.column("project_id", sa.Text),
)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("queued_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("pending", sa.Text(), nullable=True))
    op.create_index("ix_jobs_reason_state", "jobs", ["reason", "state"])
    _create_metadata()
    _fill_metadata()


def downgrade() -> None:
    op.drop_table("job_metadata")
    op.drop_index("ix_jobs_reason_state", "jobs")
    op.drop_column("jobs", "pending")
    op.drop_column("jobs", "queued_at")


def _create_metadata() -> None:
    position = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "job_metadata",
        sa.Column("job_position", position, autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_job_metadata_project_id")),
        sa.ForeignKeyConstraint(["job_position"], ["jobs.position"], name=op.f("fk_job_metadata_job_position")),
        sa.PrimaryKeyConstraint("job_position", "key", name=op.f("pk_job_metadata")),
    )
    op.create_index("ix_job_metadata_pair", "job_metadata", ["project_id", "key", "value", "job_position"])


def _fill_metadata() -> None:
    """For jobs that are there already. As `store/jobs.py` does it for new ones."""
    connection = op.get_bind()
    last = 0
    while rows := connection.execute(
        sa.select(JOBS).where(JOBS.c.position > last).order_by(JOBS.c.position).limit(BATCH)
    ).all():
        pairs = [pair for row in rows for pair in _pairs(row)]
        if pairs:
            connection.execute(sa.insert(PAIRS), pairs)
        last = rows[-1].position


def _pairs(row: Any) -> list[dict[str, Any]]:
    given = row.request.get("metadata")
    found = {"": ""} if given is None else given
    return [
        {"job_position": row.position, "project_id": row.project_id, "key": key, "value": value} for key, value in found.items()
    ]
