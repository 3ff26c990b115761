"""The person whose access a key ends with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("keys", sa.Column("signed_in_at", sa.Double(), nullable=True))
    op.add_column("keys", sa.Column("ends_with", sa.Text(), nullable=True))
    op.add_column("keys", sa.Column("latest_end", sa.Double(), nullable=True))
    op.create_index(op.f("ix_keys_ends_with"), "keys", ["ends_with"], unique=False)
