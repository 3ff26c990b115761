"""Chats that are kept to learn from, and responses to go on with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "stored_chats",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), server_default="chat", nullable=False),
        sa.Column("label", sa.Boolean(), nullable=True),
        sa.Column("choice", sa.Integer(), server_default="0", nullable=False),
        sa.Column("better", sa.JSON(), nullable=True),
        sa.Column("pairs", sa.JSON(), nullable=True),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("tools", sa.JSON(), nullable=True),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_stored_chats_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_stored_chats")),
        sa.UniqueConstraint("id", name=op.f("uq_stored_chats_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_stored_chats_expires_at"), "stored_chats", ["expires_at"], unique=False
    )
    op.create_index(
        op.f("ix_stored_chats_project_id_position_bytes"),
        "stored_chats",
        ["project_id", "position", "bytes"],
        unique=False,
    )
    op.create_table(
        "chat_metadata",
        sa.Column(
            "chat_position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["chat_position"],
            ["stored_chats.position"],
            name=op.f("fk_chat_metadata_chat_position"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_chat_metadata_project_id")
        ),
        sa.PrimaryKeyConstraint("chat_position", "key", name=op.f("pk_chat_metadata")),
    )
    op.create_index(
        "ix_chat_metadata_pair",
        "chat_metadata",
        ["project_id", "key", "value", "chat_position"],
        unique=False,
    )
