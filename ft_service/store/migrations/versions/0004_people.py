"""Add people who sign in by single sign-on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("keys", sa.Column("identity", sa.Text(), nullable=True))
    op.create_index(
        "ix_keys_person",
        "keys",
        ["identity", "project_id"],
        unique=True,
        sqlite_where=sa.text("identity IS NOT NULL AND revoked_at IS NULL"),
        postgresql_where=sa.text("identity IS NOT NULL AND revoked_at IS NULL"),
    )
