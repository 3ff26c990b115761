"""The queue: what projects have used, what jobs are expected to take and have taken, and the hosts where they run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

QUEUED = sa.text("state = 'queued'")
MEASURED = sa.text("state = 'succeeded' AND work IS NOT NULL")
OF_JOBS = (
    ("max_seconds", sa.Integer()),
    ("halt", sa.Text()),
    ("key_id", sa.Text()),
    ("base", sa.Text()),
    ("work", sa.Double()),
    ("planned_seconds", sa.Double()),
    ("left_seconds", sa.Double()),
    ("ends_at", sa.Double()),
    ("taken_at", sa.Double()),
)


def upgrade() -> None:
    op.add_column("projects", sa.Column("max_slots", sa.Integer(), nullable=True))
    op.add_column("projects", sa.Column("used", sa.Double(), server_default="0", nullable=False))
    op.add_column("projects", sa.Column("used_at", sa.Double(), server_default="0", nullable=False))
    for name, kind in OF_JOBS:
        op.add_column("jobs", sa.Column(name, kind, nullable=True))
    op.add_column("jobs", sa.Column("held_seconds", sa.Double(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("slot_seconds", sa.Double(), server_default="0", nullable=False))
    op.add_column("slots", sa.Column("taken_at", sa.Double(), nullable=True))
    op.create_index(op.f("ix_slots_project_id"), "slots", ["project_id"])
    op.create_index(
        "ix_jobs_queue_of_project",
        "jobs",
        ["project_id", sa.literal_column("priority DESC"), "position"],
        sqlite_where=QUEUED,
        postgresql_where=QUEUED,
    )
    op.create_index(
        "ix_jobs_measured",
        "jobs",
        [sa.literal_column("finished_at DESC")],
        sqlite_where=MEASURED,
        postgresql_where=MEASURED,
    )
    op.create_table(
        "hosts",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("host", name=op.f("pk_hosts")),
    )


def downgrade() -> None:
    op.drop_table("hosts")
    op.drop_index("ix_jobs_measured", "jobs")
    op.drop_index("ix_jobs_queue_of_project", "jobs")
    op.drop_index(op.f("ix_slots_project_id"), "slots")
    op.drop_column("slots", "taken_at")
    for name in ("slot_seconds", "held_seconds", *(name for name, _ in reversed(OF_JOBS))):
        op.drop_column("jobs", name)
    for name in ("used_at", "used", "max_slots"):
        op.drop_column("projects", name)
