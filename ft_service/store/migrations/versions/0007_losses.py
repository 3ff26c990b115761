"""Add the number of attempts that a job's hosts or places have ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("losses", sa.Integer(), server_default="0", nullable=False))
