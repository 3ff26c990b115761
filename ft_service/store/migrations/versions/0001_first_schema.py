"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "hosts",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("host", name=op.f("pk_hosts")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("organization", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("archived_at", sa.Double(), nullable=True),
        sa.Column("limits", sa.JSON(), nullable=True),
        sa.Column("max_slots", sa.Integer(), nullable=True),
        sa.Column("used", sa.Double(), server_default="0", nullable=False),
        sa.Column("used_at", sa.Double(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
    )
    op.create_table(
        "audit",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
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
    op.create_index(
        op.f("ix_audit_project_id_position"), "audit", ["project_id", "position"], unique=False
    )
    op.create_table(
        "deleted_models",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_deleted_models_project_id")
        ),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_deleted_models")),
    )
    op.create_index(
        op.f("ix_deleted_models_project_id"), "deleted_models", ["project_id"], unique=False
    )
    op.create_table(
        "files",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("freed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_files_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_files")),
        sa.UniqueConstraint("id", name=op.f("uq_files_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_files_project_id_position"),
        "files",
        ["project_id", "position"],
        unique=False,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index(
        "ix_files_to_free",
        "files",
        ["expires_at"],
        unique=False,
        sqlite_where=sa.text(
            "freed_at IS NULL AND (deleted_at IS NOT NULL OR expires_at IS NOT NULL)"
        ),
        postgresql_where=sa.text(
            "freed_at IS NULL AND (deleted_at IS NOT NULL OR expires_at IS NOT NULL)"
        ),
    )
    op.create_table(
        "jobs",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("desired", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("signalled", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("shapes", sa.JSON(), nullable=True),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failed_at_step", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("ingested", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=True),
        sa.Column("result_file", sa.Text(), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=True),
        sa.Column("pending", sa.Text(), nullable=True),
        sa.Column("max_seconds", sa.Integer(), nullable=True),
        sa.Column("halt", sa.Text(), nullable=True),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("work", sa.Double(), nullable=True),
        sa.Column("planned_seconds", sa.Double(), nullable=True),
        sa.Column("left_seconds", sa.Double(), nullable=True),
        sa.Column("ends_at", sa.Double(), nullable=True),
        sa.Column("taken_at", sa.Double(), nullable=True),
        sa.Column("held_seconds", sa.Double(), server_default="0", nullable=False),
        sa.Column("slot_seconds", sa.Double(), server_default="0", nullable=False),
        sa.Column("seen_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("sweep_id", sa.Text(), nullable=True),
        sa.Column("sweep_values", sa.JSON(), nullable=True),
        sa.Column("sweep_course", sa.JSON(), nullable=True),
        sa.Column("stopped", sa.Text(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), server_default="0", nullable=False),
        sa.Column("looked_at", sa.Double(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_jobs_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_jobs_attention",
        "jobs",
        ["looked_at"],
        unique=False,
        sqlite_where=sa.text("phase IS NOT NULL OR state = 'validating_files'"),
        postgresql_where=sa.text("phase IS NOT NULL OR state = 'validating_files'"),
    )
    op.create_index(
        "ix_jobs_measured",
        "jobs",
        [sa.literal_column("finished_at DESC")],
        unique=False,
        sqlite_where=sa.text("state = 'succeeded' AND work IS NOT NULL"),
        postgresql_where=sa.text("state = 'succeeded' AND work IS NOT NULL"),
    )
    op.create_index(
        op.f("ix_jobs_project_id_position"), "jobs", ["project_id", "position"], unique=False
    )
    op.create_index(
        "ix_jobs_queue",
        "jobs",
        [sa.literal_column("priority DESC"), "position"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_jobs_queue_of_project",
        "jobs",
        ["project_id", sa.literal_column("priority DESC"), "position"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index("ix_jobs_reason_state", "jobs", ["reason", "state"], unique=False)
    op.create_index(
        "ix_jobs_sweep",
        "jobs",
        ["sweep_id", "position"],
        unique=False,
        sqlite_where=sa.text("sweep_id IS NOT NULL"),
        postgresql_where=sa.text("sweep_id IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_unfinished",
        "jobs",
        ["project_id"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL OR phase IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NULL OR phase IS NOT NULL"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_keys_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_keys_digest")),
    )
    op.create_index(op.f("ix_keys_project_id"), "keys", ["project_id"], unique=False)
    op.create_table(
        "permissions",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("grantee", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["grantee"], ["projects.id"], name=op.f("fk_permissions_grantee")),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_permissions_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_permissions")),
        sa.UniqueConstraint("id", name=op.f("uq_permissions_id")),
        sa.UniqueConstraint("model", "grantee", name=op.f("uq_permissions_model_grantee")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_permissions_grantee"), "permissions", ["grantee"], unique=False)
    op.create_table(
        "request_rates",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("full_at", sa.Double(), nullable=False),
        sa.Column("taken", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_request_rates_project_id")
        ),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_request_rates")),
    )
    op.create_table(
        "sweeps",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("cancelled_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("best_job", sa.Text(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_sweeps_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_sweeps")),
        sa.UniqueConstraint("id", name=op.f("uq_sweeps_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_sweeps_project_id_position"), "sweeps", ["project_id", "position"], unique=False
    )
    op.create_index(
        "ix_sweeps_unfinished",
        "sweeps",
        ["position"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_table(
        "uploads",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("file_seconds", sa.Integer(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("part_ids", sa.JSON(), nullable=True),
        sa.Column("file_id", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_uploads_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_uploads")),
        sa.UniqueConstraint("id", name=op.f("uq_uploads_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_uploads_pending",
        "uploads",
        ["project_id", "expires_at"],
        unique=False,
        sqlite_where=sa.text("status = 'pending'"),
        postgresql_where=sa.text("status = 'pending'"),
    )
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
    op.create_table(
        "webhook_endpoints",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.JSON(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("old_secret", sa.Text(), nullable=True),
        sa.Column("old_secret_expires_at", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_webhook_endpoints_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_webhook_endpoints")),
        sa.UniqueConstraint("id", name=op.f("uq_webhook_endpoints_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_webhook_endpoints_project_id_position"),
        "webhook_endpoints",
        ["project_id", "position"],
        unique=False,
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id")),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_checkpoints_project_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("job_id", "name", name=op.f("uq_checkpoints_job_id_name")),
    )
    op.create_index(
        op.f("ix_checkpoints_job_id_step_attempt"),
        "checkpoints",
        ["job_id", "step", "attempt"],
        unique=False,
    )
    op.create_table(
        "events",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("segment", sa.Integer(), nullable=True),
        sa.Column("line", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_events_project_id")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_events")),
        sa.UniqueConstraint("id", name=op.f("uq_events_id")),
        sa.UniqueConstraint(
            "job_id",
            "attempt",
            "segment",
            "line",
            name=op.f("uq_events_job_id_attempt_segment_line"),
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_events_job_id_position"), "events", ["job_id", "position"], unique=False
    )
    op.create_table(
        "integrations",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_integrations_job_id")),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_integrations_project_id")
        ),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_integrations")),
    )
    op.create_index(
        "ix_integrations_undelivered",
        "integrations",
        ["next_try_at"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_table(
        "job_metadata",
        sa.Column(
            "job_position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_position"], ["jobs.position"], name=op.f("fk_job_metadata_job_position")
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_job_metadata_project_id")
        ),
        sa.PrimaryKeyConstraint("job_position", "key", name=op.f("pk_job_metadata")),
    )
    op.create_index(
        "ix_job_metadata_pair",
        "job_metadata",
        ["project_id", "key", "value", "job_position"],
        unique=False,
    )
    op.create_table(
        "sessions",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_sessions_key_id")),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_sessions_project_id")
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"], unique=False)
    op.create_table(
        "slots",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("taken_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_slots_job_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_slots_project_id")),
        sa.PrimaryKeyConstraint("host", "slot", name=op.f("pk_slots")),
    )
    op.create_index(op.f("ix_slots_job_id"), "slots", ["job_id"], unique=False)
    op.create_index(op.f("ix_slots_project_id"), "slots", ["project_id"], unique=False)
    op.create_table(
        "upload_parts",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("upload_id", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_upload_parts_project_id")
        ),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.id"], name=op.f("fk_upload_parts_upload_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_upload_parts")),
        sa.UniqueConstraint("id", name=op.f("uq_upload_parts_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_upload_parts_upload_id"), "upload_parts", ["upload_id"], unique=False)
    op.create_table(
        "webhook_deliveries",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name=op.f("fk_webhook_deliveries_endpoint_id"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_webhook_deliveries_project_id")
        ),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint("id", name=op.f("uq_webhook_deliveries_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_try_at"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index(
        op.f("ix_webhook_deliveries_endpoint_id"),
        "webhook_deliveries",
        ["endpoint_id"],
        unique=False,
    )
