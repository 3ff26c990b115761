"""Add the keys of requests to the files and parts that they created."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for table in ("files", "upload_parts"):
        op.add_column(table, sa.Column("idempotency_key", sa.Text(), nullable=True))
        op.create_index(
            f"ix_{table}_key",
            table,
            ["idempotency_key"],
            unique=True,
            sqlite_where=sa.text("idempotency_key IS NOT NULL"),
            postgresql_where=sa.text("idempotency_key IS NOT NULL"),
        )
