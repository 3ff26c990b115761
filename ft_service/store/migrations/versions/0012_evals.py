"""Add evals, their runs and what came of the runs' items."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "evals",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("data_source_config", sa.JSON(), nullable=False),
        sa.Column("testing_criteria", sa.JSON(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_evals_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_evals")),
        sa.UniqueConstraint("id", name=op.f("uq_evals_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_evals_project_id_position"), "evals", ["project_id", "position"], unique=False
    )
    op.create_table(
        "eval_runs",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("eval_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("data_source", sa.JSON(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("total", sa.Integer(), nullable=True),
        sa.Column("tally", sa.JSON(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("owned_until", sa.Double(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["eval_id"], ["evals.id"], name=op.f("fk_eval_runs_eval_id")),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_eval_runs_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_eval_runs")),
        sa.UniqueConstraint("id", name=op.f("uq_eval_runs_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_eval_runs_eval_id_position"), "eval_runs", ["eval_id", "position"], unique=False
    )
    op.create_index(
        op.f("ix_eval_runs_project_id_position"),
        "eval_runs",
        ["project_id", "position"],
        unique=False,
    )
    op.create_index(
        "ix_eval_runs_unfinished",
        "eval_runs",
        ["position"],
        unique=False,
        sqlite_where=sa.text("status IN ('queued', 'in_progress')"),
        postgresql_where=sa.text("status IN ('queued', 'in_progress')"),
    )
    op.create_table(
        "eval_items",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("item", sa.JSON(), nullable=False),
        sa.Column("sample", sa.JSON(), nullable=False),
        sa.Column("results", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_eval_items_project_id")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["eval_runs.id"], name=op.f("fk_eval_items_run_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_eval_items")),
        sa.UniqueConstraint("id", name=op.f("uq_eval_items_id")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_eval_items_run_id_number")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_eval_items_project_id"), "eval_items", ["project_id"], unique=False)
    op.create_index(
        op.f("ix_eval_items_run_id_position"), "eval_items", ["run_id", "position"], unique=False
    )
