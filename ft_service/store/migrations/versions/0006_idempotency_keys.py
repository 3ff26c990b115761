"""Add the keys of requests to the files and parts that they created."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("files", sa.Column("idempotency_key", sa.Text(), nullable=True))
    op.create_index(
        "ix_files_key",
        "files",
        ["idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.add_column("upload_parts", sa.Column("idempotency_key", sa.Text(), nullable=True))
    op.create_index(
        "ix_upload_parts_key",
        "upload_parts",
        ["idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
