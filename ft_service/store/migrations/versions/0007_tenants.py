"""Projects with names, limits and an end; the record of changes; use by project, key and day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("projects", sa.Column("name", sa.Text(), nullable=True))
    op.add_column("projects", sa.Column("limits", sa.JSON(), nullable=True))
    op.add_column("projects", sa.Column("archived_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("seen_tokens", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "audit",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("detail", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_audit_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_audit")),
        sa.UniqueConstraint("id", name=op.f("uq_audit_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_audit_project_id_position"), "audit", ["project_id", "position"])
    op.create_table(
        "usage",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("slot_seconds", sa.Double(), server_default="0", nullable=False),
        sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("jobs", sa.Integer(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_usage_project_id")),
        sa.PrimaryKeyConstraint("project_id", "key_id", "day", name=op.f("pk_usage")),
    )


def downgrade() -> None:
    op.drop_table("usage")
    op.drop_table("audit")
    op.drop_column("jobs", "seen_tokens")
    for name in ("archived_at", "limits", "name"):
        op.drop_column("projects", name)
