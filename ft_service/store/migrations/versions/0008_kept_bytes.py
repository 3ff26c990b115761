"""Count what Tinker's clients keep towards the bytes of their projects."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column(
        "projects", sa.Column("model_bytes", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.add_column(
        "tinker_sessions", sa.Column("bytes", sa.Integer(), server_default="0", nullable=False)
    )
    op.execute(
        "UPDATE tinker_sessions SET bytes = length(CAST(user_metadata AS TEXT)) WHERE "
        "user_metadata IS NOT NULL"
    )
    op.create_index("ix_tinker_samplers_project_id", "tinker_samplers", ["project_id"])
