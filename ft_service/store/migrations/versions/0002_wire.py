"""What the rest of the wire needs: files that expire, uploads in parts, permissions, deleted models, webhooks. Only adds."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

POSITION = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TABLES = ("uploads", "upload_parts", "permissions", "deleted_models", "webhook_endpoints", "webhook_deliveries")


def upgrade() -> None:
    _extend_files()
    _create_uploads()
    _create_upload_parts()
    _create_permissions()
    _create_deleted_models()
    _create_webhook_endpoints()
    _create_webhook_deliveries()


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
    op.drop_index("ix_files_to_free", "files")
    op.drop_column("files", "freed_at")
    op.drop_column("files", "expires_at")


def _create(name: str, *columns: Any) -> None:
    """A table whose rows belong to a project and have a place in its lists."""
    op.create_table(
        name,
        sa.Column("position", POSITION, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        *columns,
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f(f"fk_{name}_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f(f"pk_{name}")),
        sa.UniqueConstraint("id", name=op.f(f"uq_{name}_id")),
        sqlite_autoincrement=True,
    )


def _index_where(name: str, table: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)


def _extend_files() -> None:
    op.add_column("files", sa.Column("expires_at", sa.Double(), nullable=True))
    op.add_column("files", sa.Column("freed_at", sa.Double(), nullable=True))
    unfreed = "freed_at IS NULL AND (deleted_at IS NOT NULL OR expires_at IS NOT NULL)"
    _index_where("ix_files_to_free", "files", ["expires_at"], unfreed)


def _create_uploads() -> None:
    _create(
        "uploads",
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("file_seconds", sa.Integer(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("part_ids", sa.JSON(), nullable=True),
        sa.Column("file_id", sa.Text(), nullable=True),
    )
    _index_where("ix_uploads_pending", "uploads", ["project_id", "expires_at"], "status = 'pending'")


def _create_upload_parts() -> None:
    _create(
        "upload_parts",
        sa.Column("upload_id", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_upload_parts_upload_id")),
    )
    op.create_index(op.f("ix_upload_parts_upload_id"), "upload_parts", ["upload_id"])


def _create_permissions() -> None:
    _create(
        "permissions",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("grantee", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["grantee"], ["projects.id"], name=op.f("fk_permissions_grantee")),
        sa.UniqueConstraint("model", "grantee", name=op.f("uq_permissions_model_grantee")),
    )
    op.create_index(op.f("ix_permissions_grantee"), "permissions", ["grantee"])


def _create_deleted_models() -> None:
    op.create_table(
        "deleted_models",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_deleted_models_project_id")),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_deleted_models")),
    )
    op.create_index(op.f("ix_deleted_models_project_id"), "deleted_models", ["project_id"])


def _create_webhook_endpoints() -> None:
    _create(
        "webhook_endpoints",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.JSON(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("old_secret", sa.Text(), nullable=True),
        sa.Column("old_secret_expires_at", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )
    op.create_index(op.f("ix_webhook_endpoints_project_id_position"), "webhook_endpoints", ["project_id", "position"])


def _create_webhook_deliveries() -> None:
    _create(
        "webhook_deliveries",
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["endpoint_id"], ["webhook_endpoints.id"], name=op.f("fk_webhook_deliveries_endpoint_id")),
    )
    op.create_index(op.f("ix_webhook_deliveries_endpoint_id"), "webhook_deliveries", ["endpoint_id"])
    _index_where("ix_webhook_deliveries_due", "webhook_deliveries", ["next_try_at"], "finished_at IS NULL")
