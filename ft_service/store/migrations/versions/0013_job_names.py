"""Names and notes that users give their jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("name", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("note", sa.Text(), nullable=True))
