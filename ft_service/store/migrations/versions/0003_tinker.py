"""Add sessions, samplers and samples of Tinker clients."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "tinker_samplers",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text(), nullable=True),
        sa.Column("owns_weights", sa.Boolean(), nullable=False),
        sa.Column("clients", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.Column("logprob_gap", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_tinker_samplers_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_tinker_samplers")),
        sa.UniqueConstraint("id", name=op.f("uq_tinker_samplers_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_tinker_samplers_session_id_position"),
        "tinker_samplers",
        ["session_id", "position"],
        unique=False,
    )
    op.create_table(
        "tinker_samples",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("sampler_id", sa.Text(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("answered_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_tinker_samples_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_tinker_samples")),
        sa.UniqueConstraint("id", name=op.f("uq_tinker_samples_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_tinker_samples_answered_at"), "tinker_samples", ["answered_at"], unique=False
    )
    op.create_index(
        "ix_tinker_samples_unanswered",
        "tinker_samples",
        ["position"],
        unique=False,
        sqlite_where=sa.text("answered_at IS NULL"),
        postgresql_where=sa.text("answered_at IS NULL"),
    )
    op.create_table(
        "tinker_sessions",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_tinker_sessions_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_tinker_sessions")),
        sa.UniqueConstraint("id", name=op.f("uq_tinker_sessions_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_tinker_sessions_project_id_position"),
        "tinker_sessions",
        ["project_id", "position"],
        unique=False,
    )
