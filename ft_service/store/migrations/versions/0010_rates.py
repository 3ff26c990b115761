"""Buckets of requests that several servers share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "request_rates",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("full_at", sa.Double(), nullable=False),
        sa.Column("taken", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_request_rates_project_id")),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_request_rates")),
    )


def downgrade() -> None:
    op.drop_table("request_rates")
