"""Hosts with agents, what they run, and jobs that may have more or fewer ranks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

OF_HOSTS = (
    ("place", sa.Text()),
    ("address", sa.Text()),
    ("kind", sa.Text()),
    ("gpus", sa.Integer()),
    ("memory", sa.BigInteger()),
    ("agent", sa.Text()),
    ("drained_at", sa.Double()),
    ("joined_at", sa.Double()),
)
OF_JOBS = (("nodes", sa.Integer()), ("shapes", sa.JSON()), ("memory", sa.BigInteger()))


def upgrade() -> None:
    for name, kind in OF_HOSTS:
        op.add_column("hosts", sa.Column(name, kind, nullable=True))
    for name, kind in OF_JOBS:
        op.add_column("jobs", sa.Column(name, kind, nullable=True))
    op.create_table(
        "attempt_nodes",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("wanted", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=True),
        sa.Column("fault", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempt_nodes_job_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_attempt_nodes_project_id")),
        sa.PrimaryKeyConstraint("job_id", "attempt", "node", name=op.f("pk_attempt_nodes")),
    )
    op.create_index(op.f("ix_attempt_nodes_host"), "attempt_nodes", ["host"])


def downgrade() -> None:
    op.drop_table("attempt_nodes")
    for name, _ in reversed(OF_JOBS):
        op.drop_column("jobs", name)
    for name, _ in reversed(OF_HOSTS):
        op.drop_column("hosts", name)
