"""The schema: every table, its constraints and the indexes that keep claims and lists flat.

`migrations/` creates the same.

Rows of jobs, files and events have a `position` that rises with creation: lists and cursors go by
it, because two rows can share a time. Conditions of partial indexes are written with literals,
since SQLite uses such an index only for a query that says the same.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    and_,
    literal_column,
    or_,
    select,
    union_all,
)

from ft_service.jobs.states import State
from ft_service.store.database import StorableJson, StorableText

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _id() -> Column[str]:
    return Column("id", StorableText, nullable=False, unique=True)


def _position() -> Column[int]:
    return Column(
        "position",
        BigInteger().with_variant(Integer, "sqlite"),
        primary_key=True,
        autoincrement=True,
    )


def _project() -> Column[str]:
    return Column("project_id", ForeignKey("projects.id"), nullable=False)


def _job() -> Column[str]:
    return Column("job_id", ForeignKey("jobs.id"), nullable=False)


projects = Table(
    "projects",
    metadata,
    Column("id", StorableText, primary_key=True),
    Column("organization", StorableText, nullable=False),
    # NULL: its id.
    Column("name", StorableText),
    Column("created_at", Double, nullable=False),
    Column("archived_at", Double),
    # Since when it is hidden, and what it has is removed; and when that was done.
    Column("deleted_at", Double),
    Column("erased_at", Double),
    # Besides max_slots (ft_service/store/records.py: Limits).
    Column("limits", StorableJson),
    # Ranks that it may run at once; NULL: no limit.
    Column("max_slots", Integer),
    # Slot-seconds that it has used and that are not forgotten, as of used_at
    # (ft_service/jobs/queue.py).
    Column("used", Double, nullable=False, server_default="0"),
    Column("used_at", Double, nullable=False, server_default="0"),
    # Bytes of the commands and saved weights of its Tinker models, counted now and then if it has a
    # limit of bytes.
    Column("model_bytes", BigInteger, nullable=False, server_default="0"),
)

LIVING_PERSON = literal_column("identity IS NOT NULL AND revoked_at IS NULL")

keys = Table(
    "keys",
    metadata,
    Column("id", StorableText, primary_key=True),
    _project(),
    Column("name", StorableText, nullable=False),
    Column("scope", StorableText, nullable=False),
    Column("prefix", StorableText, nullable=False),
    Column("digest", StorableText, nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("last_used_at", Double),
    Column("revoked_at", Double),
    # Of a person who signs in by single sign-on: issuer and subject. No secret opens such a key,
    # only a session. NULL: a key.
    Column("identity", StorableText),
    # Of such a person: the last sign-in.
    Column("signed_in_at", Double),
    # Row of the person whose access this key ends with; NULL: it ends by itself.
    Column("ends_with", StorableText),
    # Of such a key: its end, however often the person signs in; NULL: never.
    Column("latest_end", Double),
)
Index(None, keys.c.project_id)
Index(None, keys.c.ends_with)
Index(
    "ix_keys_person",
    keys.c.identity,
    keys.c.project_id,
    unique=True,
    sqlite_where=LIVING_PERSON,
    postgresql_where=LIVING_PERSON,
)

files = Table(
    "files",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("filename", StorableText, nullable=False),
    Column("purpose", StorableText, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", StorableText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("deleted_at", Double),
    Column("expires_at", Double),
    # When its bytes were removed from the disk.
    Column("freed_at", Double),
    # Digest of the key of the request that created it; NULL: it had none.
    Column("idempotency_key", StorableText),
    sqlite_autoincrement=True,
)
VISIBLE = files.c.deleted_at.is_(None)
TO_FREE = and_(
    files.c.freed_at.is_(None),
    or_(files.c.deleted_at.is_not(None), files.c.expires_at.is_not(None)),
)
Index(None, files.c.project_id, files.c.position, sqlite_where=VISIBLE, postgresql_where=VISIBLE)
Index("ix_files_to_free", files.c.expires_at, sqlite_where=TO_FREE, postgresql_where=TO_FREE)
KEYED_FILE = files.c.idempotency_key.is_not(None)
Index(
    "ix_files_key",
    files.c.idempotency_key,
    unique=True,
    sqlite_where=KEYED_FILE,
    postgresql_where=KEYED_FILE,
)

jobs = Table(
    "jobs",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("created_at", Double, nullable=False),
    Column("request", StorableJson, nullable=False),
    Column("spec", StorableJson, nullable=False),
    Column("state", StorableText, nullable=False),
    Column("phase", StorableText),
    Column("desired", StorableText, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("signalled", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    # Of all nodes together; of a job that may have more or fewer, as its newest attempt has or its
    # next one must.
    Column("slots", Integer, nullable=False),
    Column("nodes", Integer, nullable=False),
    # [[nodes, ranks of each], …] that it may have, the largest first; NULL: only the one that its
    # spec says.
    Column("shapes", StorableJson),
    # Bytes that a rank needs; NULL: not known.
    Column("host", StorableText),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("failed_at_step", Integer, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("ingested", Integer, nullable=False),
    Column("reason", StorableText),
    Column("error", StorableJson),
    Column("finished_at", Double),
    Column("trained_tokens", BigInteger),
    Column("result_file", StorableText),
    # When it entered the queue; NULL: it never did.
    Column("queued_at", Double),
    Column("pending", StorableText),
    Column("max_seconds", Integer),
    Column("halt", StorableText),
    Column("key_id", StorableText),
    # Name of the base, which the spec holds too.
    Column("base", StorableText, nullable=False),
    Column("work", Double),
    Column("planned_seconds", Double),
    Column("left_seconds", Double),
    Column("ends_at", Double),
    # Since when its attempt holds slots; NULL: it holds none.
    Column("taken_at", Double),
    # For how long it held slots, and times their number: over its attempts that have given them
    # back.
    Column("held_seconds", Double, nullable=False, server_default="0"),
    Column("slot_seconds", Double, nullable=False, server_default="0"),
    Column("seen_tokens", BigInteger, nullable=False, server_default="0"),
    # Money in millionths of the currency (ft_service/money.py). The most that it may cost; NULL: no
    # limit.
    Column("max_cost", BigInteger),
    # Of a slot-hour, as its newest attempt pays it; NULL: no price is known.
    Column("price", BigInteger),
    Column("currency", StorableText),
    Column("grams_per_kwh", Double),
    # What its attempts that have given their slots back have cost.
    Column("cost", BigInteger, nullable=False, server_default="0"),
    # Energy of all attempts, and of the newest one so far; NULL: not measured.
    Column("joules", Double),
    Column("attempt_joules", Double),
    Column("co2_grams", Double),
    # The sweep that it is one of (ft_service/store/sweeps.py), and what it has of its own there;
    # NULL: it is alone.
    Column("sweep_id", StorableText),
    Column("sweep_values", StorableJson),
    Column("sweep_course", StorableJson),
    Column("stopped", StorableText),
    # Which jobs may share an engine; NULL: it runs alone.
    Column("share_key", StorableText),
    # What it takes in an engine; NULL: not planned.
    Column("seat", StorableJson),
    # The engine in which its attempt has a seat; NULL: none.
    Column("engine_id", StorableText),
    Column("fault_group", StorableText),
    Column("traceparent", StorableText),
    # How its users call it, and what they have noted about it; NULL: nothing.
    Column("name", StorableText),
    Column("note", StorableText),
    # Since when it is hidden, until its rows and its run directory are removed.
    Column("deleted_at", Double),
    # When its events were removed by their age.
    Column("trimmed_at", Double),
    Column("version", Integer, nullable=False),
    Column("lease_owner", StorableText),
    Column("lease_token", StorableText),
    # 0: the lease is free.
    Column("lease_expires_at", Double, nullable=False, server_default="0"),
    # 0: to be looked at as soon as possible.
    Column("looked_at", Double, nullable=False, server_default="0"),
    sqlite_autoincrement=True,
)
# A job has processes, or may have, as long as it has a phase.
NEEDS_ATTENTION = or_(
    jobs.c.phase.is_not(None), jobs.c.state == literal_column(f"'{State.VALIDATING.value}'")
)
QUEUED = jobs.c.state == literal_column(f"'{State.QUEUED.value}'")
WAITING = jobs.c.state.in_(
    [literal_column(f"'{state.value}'") for state in (State.VALIDATING, State.QUEUED)]
)
MEASURED = and_(
    jobs.c.state == literal_column(f"'{State.SUCCEEDED.value}'"), jobs.c.work.is_not(None)
)
UNFINISHED = or_(jobs.c.finished_at.is_(None), jobs.c.phase.is_not(None))
ENDED = and_(jobs.c.finished_at.is_not(None), jobs.c.deleted_at.is_(None))
UNTRIMMED = and_(jobs.c.finished_at.is_not(None), jobs.c.trimmed_at.is_(None))
DELETED = jobs.c.deleted_at.is_not(None)
Index(None, jobs.c.project_id, jobs.c.position)
# By reason first: led by the state, SQLite would take it for the queue too, and sort.
Index("ix_jobs_reason_state", jobs.c.reason, jobs.c.state)
Index(
    "ix_jobs_attention",
    jobs.c.looked_at,
    sqlite_where=NEEDS_ATTENTION,
    postgresql_where=NEEDS_ATTENTION,
)
Index(
    "ix_jobs_queue",
    jobs.c.priority.desc(),
    jobs.c.position,
    sqlite_where=QUEUED,
    postgresql_where=QUEUED,
)
Index(
    "ix_jobs_queue_of_project",
    jobs.c.project_id,
    jobs.c.priority.desc(),
    jobs.c.position,
    sqlite_where=QUEUED,
    postgresql_where=QUEUED,
)
# By which waiting jobs are estimated.
Index(
    "ix_jobs_measured", jobs.c.finished_at.desc(), sqlite_where=MEASURED, postgresql_where=MEASURED
)
# What goes by age, and what its users have deleted.
Index("ix_jobs_ended", jobs.c.finished_at, sqlite_where=ENDED, postgresql_where=ENDED)
Index("ix_jobs_untrimmed", jobs.c.finished_at, sqlite_where=UNTRIMMED, postgresql_where=UNTRIMMED)
Index("ix_jobs_deleted", jobs.c.position, sqlite_where=DELETED, postgresql_where=DELETED)
Index("ix_jobs_unfinished", jobs.c.project_id, sqlite_where=UNFINISHED, postgresql_where=UNFINISHED)


def referred_to() -> ColumnElement[bool]:
    """Condition of a file: an unfinished job refers to it.

    The jobs' files are read once, not for every file.
    """
    names = [
        jobs.c.request[name].as_string().label("file_id")
        for name in ("training_file", "validation_file")
    ]
    needed = union_all(
        *(select(name).where(UNFINISHED, name.is_not(None)) for name in names)
    ).subquery()
    return files.c.id.in_(select(needed.c.file_id))


SEATED = jobs.c.engine_id.is_not(None)
Index("ix_jobs_engine", jobs.c.engine_id, sqlite_where=SEATED, postgresql_where=SEATED)

# The pairs of a create body's metadata, to find jobs by; a job without metadata has the one pair
# ("", ""), which no user can write.
job_metadata = Table(
    "job_metadata",
    metadata,
    Column(
        "job_position",
        BigInteger().with_variant(Integer, "sqlite"),
        ForeignKey("jobs.position"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("key", StorableText, primary_key=True),
    Column("value", StorableText, nullable=False),
    _project(),
)
Index(
    "ix_job_metadata_pair",
    job_metadata.c.project_id,
    job_metadata.c.key,
    job_metadata.c.value,
    job_metadata.c.job_position,
)

events = Table(
    "events",
    metadata,
    _position(),
    _id(),
    _project(),
    _job(),
    # Where a worker's event came from; NULL for the service's own, which are never read twice.
    Column("attempt", Integer),
    Column("segment", Integer),
    Column("line", Integer),
    Column("created_at", Double, nullable=False),
    Column("level", StorableText, nullable=False),
    Column("message", StorableText, nullable=False),
    Column("metrics", StorableJson),
    UniqueConstraint("job_id", "attempt", "segment", "line"),
    sqlite_autoincrement=True,
)
Index(None, events.c.job_id, events.c.position)

# Where else a job's metrics are sent, for jobs that ask for it.
integrations = Table(
    "integrations",
    metadata,
    Column("job_id", ForeignKey("jobs.id"), primary_key=True),
    # Its place in the create body's list.
    Column("number", Integer, primary_key=True, autoincrement=False),
    _project(),
    # As in the create body.
    Column("settings", StorableJson, nullable=False),
    # Of the run there; NULL: none was begun yet.
    Column("url", StorableText),
    # The last thing that went wrong.
    Column("error", StorableText),
    # That went wrong since sending last ended well.
    Column("tries", Integer, nullable=False),
    Column("next_try_at", Double, nullable=False),
    # The process that sends; NULL: none.
    Column("owner", StorableText),
    Column("lease_expires_at", Double, nullable=False),
    # Once all is there, or given up.
    Column("finished_at", Double),
)
UNDELIVERED = integrations.c.finished_at.is_(None)
Index(
    "ix_integrations_undelivered",
    integrations.c.next_try_at,
    sqlite_where=UNDELIVERED,
    postgresql_where=UNDELIVERED,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", StorableText, primary_key=True),
    _project(),
    _job(),
    Column("name", StorableText, nullable=False),
    Column("step", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("metrics", StorableJson),
    UniqueConstraint("job_id", "name"),
)
Index(None, checkpoints.c.job_id, checkpoints.c.step, checkpoints.c.attempt)

# Hosts, and clusters, where attempts run, each told of by its own reconciler. They are no
# project's.
hosts = Table(
    "hosts",
    metadata,
    Column("host", StorableText, primary_key=True),
    Column("slots", Integer, nullable=False),
    Column("seen_at", Double, nullable=False),
)

slots = Table(
    "slots",
    metadata,
    Column("host", StorableText, primary_key=True),
    Column("slot", Integer, primary_key=True, autoincrement=False),
    _project(),
    _job(),
    Column("attempt", Integer, nullable=False),
    Column("taken_at", Double, nullable=False),
    # The engine that holds it, which the job started; NULL: the job itself.
    Column("engine_id", StorableText),
)
Index(None, slots.c.job_id)
Index(None, slots.c.project_id)

# Sets of ranks that train several jobs on one base. A job in one names it in jobs.engine_id.
engines = Table(
    "engines",
    metadata,
    Column("id", StorableText, primary_key=True),
    _project(),
    Column("host", StorableText, nullable=False),
    # What its jobs have in common, as in jobs.
    Column("share_key", StorableText, nullable=False),
    Column("fault_group", StorableText),
    Column("ranks", Integer, nullable=False),
    Column("most_seats", Integer, nullable=False),
    # Bytes of a rank for its seats and a round; NULL: not known.
    Column("room", BigInteger),
    Column("created_at", Double, nullable=False),
    # Slot-seconds by job, for those that still sit there, up to divided_at: since then nobody took
    # or left a seat.
    Column("use", StorableJson),
    Column("divided_at", Double, nullable=False),
    # As in jobs, of all its seats.
    Column("price", BigInteger),
    Column("currency", StorableText),
    Column("grams_per_kwh", Double),
    # Energy that was reported so far, and of it that of each job which still sits there; NULL: not
    # measured.
    Column("joules", Double),
    Column("energy", StorableJson),
    # When it was asked to end.
    Column("closing_at", Double),
    # When its slots became free.
    Column("ended_at", Double),
)
LIVE = engines.c.ended_at.is_(None)
Index("ix_engines_live", engines.c.host, sqlite_where=LIVE, postgresql_where=LIVE)

uploads = Table(
    "uploads",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("filename", StorableText, nullable=False),
    Column("purpose", StorableText, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    # Lifetime of the file that it becomes, in seconds; NULL: until it is deleted.
    Column("file_seconds", Integer),
    Column("status", StorableText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    # The part ids it was completed with, in order.
    Column("part_ids", StorableJson),
    Column("file_id", StorableText),
    sqlite_autoincrement=True,
)
PENDING = uploads.c.status == literal_column("'pending'")
Index(
    "ix_uploads_pending",
    uploads.c.project_id,
    uploads.c.expires_at,
    sqlite_where=PENDING,
    postgresql_where=PENDING,
)

upload_parts = Table(
    "upload_parts",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("upload_id", ForeignKey("uploads.id"), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", StorableText, nullable=False),
    Column("created_at", Double, nullable=False),
    # As in files.
    Column("idempotency_key", StorableText),
    sqlite_autoincrement=True,
)
Index(None, upload_parts.c.upload_id)
KEYED_PART = upload_parts.c.idempotency_key.is_not(None)
Index(
    "ix_upload_parts_key",
    upload_parts.c.idempotency_key,
    unique=True,
    sqlite_where=KEYED_PART,
    postgresql_where=KEYED_PART,
)

# Who else may use a tuned model or one of its checkpoints. `project_id` is the owner's.
permissions = Table(
    "permissions",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("model", StorableText, nullable=False),
    Column("grantee", ForeignKey("projects.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("model", "grantee"),
    sqlite_autoincrement=True,
)
Index(None, permissions.c.grantee)

deleted_models = Table(
    "deleted_models",
    metadata,
    Column("model", StorableText, primary_key=True),
    _project(),
    Column("deleted_at", Double, nullable=False),
    # When its job was erased; the name stays a while for inference servers that have it loaded.
    # NULL: the job is there.
    Column("erased_at", Double),
)
ERASED = deleted_models.c.erased_at.is_not(None)
Index(None, deleted_models.c.project_id)
Index(
    "ix_deleted_models_erased",
    deleted_models.c.erased_at,
    sqlite_where=ERASED,
    postgresql_where=ERASED,
)

webhook_endpoints = Table(
    "webhook_endpoints",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("name", StorableText, nullable=False),
    Column("url", StorableText, nullable=False),
    Column("event_types", StorableJson, nullable=False),
    # In clear, since every delivery is signed with it.
    Column("secret", StorableText, nullable=False),
    Column("old_secret", StorableText),
    Column("old_secret_expires_at", Double),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    sqlite_autoincrement=True,
)
Index(None, webhook_endpoints.c.project_id, webhook_endpoints.c.position)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("endpoint_id", ForeignKey("webhook_endpoints.id"), nullable=False),
    Column("body", StorableText, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("tries", Integer, nullable=False),
    # Also the end of the lease of the process that sends it.
    Column("next_try_at", Double, nullable=False),
    # Once delivered, or given up.
    Column("finished_at", Double),
    # Of the last try that failed.
    Column("error", StorableText),
    sqlite_autoincrement=True,
)
UNSENT = webhook_deliveries.c.finished_at.is_(None)
Index(None, webhook_deliveries.c.endpoint_id)
Index(
    "ix_webhook_deliveries_due",
    webhook_deliveries.c.next_try_at,
    sqlite_where=UNSENT,
    postgresql_where=UNSENT,
)

# Changes, by whom; rows are only ever added.
audit = Table(
    "audit",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("created_at", Double, nullable=False),
    # What happened, as "key.created", and to what.
    Column("type", StorableText, nullable=False),
    Column("target", StorableText, nullable=False),
    # By which key, and from which address; NULL: on the service's own machine, by `ft`.
    Column("key_id", StorableText),
    Column("address", StorableText),
    Column("detail", StorableJson),
    sqlite_autoincrement=True,
)
Index(None, audit.c.project_id, audit.c.position)

# What was used on a day (UTC), counted from 1970-01-01.
usage = Table(
    "usage",
    metadata,
    Column("project_id", ForeignKey("projects.id"), primary_key=True),
    # Empty: not known.
    Column("key_id", StorableText, primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    # In steps of 1/1024 s, so that sums are exact.
    Column("slot_seconds", Double, nullable=False, server_default="0"),
    Column("tokens", BigInteger, nullable=False, server_default="0"),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Column("jobs", Integer, nullable=False, server_default="0"),
    # In millionths of the currency; NULL: nothing had a price.
    Column("cost", BigInteger, nullable=False, server_default="0"),
    Column("currency", StorableText),
    Column("joules", Double, nullable=False, server_default="0"),
    Column("co2_grams", Double, nullable=False, server_default="0"),
)

# How many requests projects send, where several servers share that: when the bucket is full again,
# and what the last one who drew from it got.
request_rates = Table(
    "request_rates",
    metadata,
    Column("project_id", ForeignKey("projects.id"), primary_key=True),
    Column("full_at", Double, nullable=False),
    Column("taken", BigInteger, nullable=False),
)

# Browsers that are signed in, and links that sign in once. Only digests are kept; a row that is
# gone opens nothing.
sessions = Table(
    "sessions",
    metadata,
    Column("digest", StorableText, primary_key=True),
    # "session" or "link".
    Column("kind", StorableText, nullable=False),
    _project(),
    Column("key_id", ForeignKey("keys.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
)
Index(None, sessions.c.expires_at)

# Sweeps, and the index by which their jobs are found.
sweeps = Table(
    "sweeps",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("created_at", Double, nullable=False),
    # The create body.
    Column("request", StorableJson, nullable=False),
    # How its values were chosen, and when it stops a job.
    Column("settings", StorableJson, nullable=False),
    Column("cancelled_at", Double),
    # Once all its jobs are over.
    Column("finished_at", Double),
    # The best job, once finished; NULL: none has succeeded.
    Column("best_job", StorableText),
    Column("deleted_at", Double),
    sqlite_autoincrement=True,
)
UNFINISHED_SWEEP = sweeps.c.finished_at.is_(None)
OF_SWEEPS = jobs.c.sweep_id.is_not(None)
Index(None, sweeps.c.project_id, sweeps.c.position)
Index(
    "ix_sweeps_unfinished",
    sweeps.c.position,
    sqlite_where=UNFINISHED_SWEEP,
    postgresql_where=UNFINISHED_SWEEP,
)
Index(
    "ix_jobs_sweep",
    jobs.c.sweep_id,
    jobs.c.position,
    sqlite_where=OF_SWEEPS,
    postgresql_where=OF_SWEEPS,
)

# Chats that their callers asked to keep (`store: true`), as data to learn from, and responses, to
# go on with.
stored_chats = Table(
    "stored_chats",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    # Of messages, tools and answer, as JSON.
    Column("bytes", BigInteger, nullable=False),
    Column("model", StorableText, nullable=False),
    # chat or response.
    Column("kind", StorableText, nullable=False, server_default="chat"),
    # What its users say: whether the answer is a good one, which of several it is, and a better
    # one, as a message. NULL: nothing.
    Column("label", Boolean),
    Column("choice", Integer, nullable=False, server_default="0"),
    Column("better", StorableJson),
    Column("pairs", StorableJson),
    # Of a response: the items of its whole conversation.
    Column("messages", StorableJson, nullable=False),
    Column("tools", StorableJson),
    # The chat completion, or the response.
    Column("answer", StorableJson, nullable=False),
    sqlite_autoincrement=True,
)
Index(None, stored_chats.c.project_id, stored_chats.c.position, stored_chats.c.bytes)
Index(None, stored_chats.c.expires_at)

# The pairs of their metadata, to find them by.
chat_metadata = Table(
    "chat_metadata",
    metadata,
    Column(
        "chat_position",
        BigInteger().with_variant(Integer, "sqlite"),
        ForeignKey("stored_chats.position"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("key", StorableText, primary_key=True),
    Column("value", StorableText, nullable=False),
    _project(),
)
Index(
    "ix_chat_metadata_pair",
    chat_metadata.c.project_id,
    chat_metadata.c.key,
    chat_metadata.c.value,
    chat_metadata.c.chat_position,
)

# Sessions of Tinker clients; their models are jobs.
tinker_sessions = Table(
    "tinker_sessions",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("created_at", Double, nullable=False),
    # Last sign of life of the client.
    Column("used_at", Double, nullable=False),
    # When the client said that it has finished, and how.
    Column("finished_at", Double),
    Column("finish_reason", StorableText),
    Column("display_name", StorableText),
    Column("user_metadata", StorableJson),
    # Bytes that it counts for in its project.
    Column("bytes", Integer, nullable=False, server_default="0"),
    sqlite_autoincrement=True,
)
Index(None, tinker_sessions.c.project_id, tinker_sessions.c.position)

TINKER_ROW_BYTES = 512
"""Bytes that a sampler counts for in its project, and a session without its metadata."""

# What sessions sample from: a base, or saved weights.
tinker_samplers = Table(
    "tinker_samplers",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("session_id", StorableText, nullable=False),
    Column("base", StorableText, nullable=False),
    # Path of the saved weights; NULL: the base alone.
    Column("model_path", StorableText),
    # Whether the weights were saved without a name, for this sampler alone.
    Column("owns_weights", Boolean, nullable=False),
    # Clients that sample from it; each has a range of request numbers.
    Column("clients", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double, nullable=False),
    # Mean distance in nats between the sampler's and the trainer's log-probabilities; NULL: not
    # measured.
    Column("logprob_gap", Double),
    sqlite_autoincrement=True,
)
Index(None, tinker_samplers.c.session_id, tinker_samplers.c.position)
Index(None, tinker_samplers.c.project_id)

# Requests for samples with their answers, until these are an hour old.
tinker_samples = Table(
    "tinker_samples",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("sampler_id", StorableText, nullable=False),
    Column("request", StorableJson, nullable=False),
    Column("created_at", Double, nullable=False),
    # The client's message, or why there is none: {error, category}.
    Column("answer", LargeBinary),
    Column("error", StorableJson),
    # NULL: it waits.
    Column("answered_at", Double),
    sqlite_autoincrement=True,
)
UNANSWERED = tinker_samples.c.answered_at.is_(None)
Index(
    "ix_tinker_samples_unanswered",
    tinker_samples.c.position,
    sqlite_where=UNANSWERED,
    postgresql_where=UNANSWERED,
)
Index(None, tinker_samples.c.answered_at)

evals = Table(
    "evals",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("created_at", Double, nullable=False),
    Column("name", StorableText),
    Column("metadata", StorableJson),
    # The create body's data_source_config and testing_criteria.
    Column("data_source_config", StorableJson, nullable=False),
    Column("testing_criteria", StorableJson, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
Index(None, evals.c.project_id, evals.c.position)

eval_runs = Table(
    "eval_runs",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("eval_id", ForeignKey("evals.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    # The key that asked for it.
    Column("key_id", StorableText, nullable=False),
    Column("name", StorableText),
    Column("metadata", StorableJson),
    # Of the create body.
    Column("data_source", StorableJson, nullable=False),
    # OpenAI's words: queued, in_progress, completed, canceled, failed.
    Column("status", StorableText, nullable=False),
    Column("error", StorableJson),
    # Items; NULL: the file is not read yet.
    Column("total", Integer),
    # Counts of its items (ft_service/evals/item_results.py).
    Column("tally", StorableJson, nullable=False),
    # The process that carries it out, and until when.
    Column("owner", StorableText),
    Column("owned_until", Double, nullable=False),
    # Of its body and of its items.
    Column("bytes", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
UNFINISHED_RUN = eval_runs.c.status.in_(
    [literal_column("'queued'"), literal_column("'in_progress'")]
)
Index(None, eval_runs.c.eval_id, eval_runs.c.position)
Index(None, eval_runs.c.project_id, eval_runs.c.position)
Index(
    "ix_eval_runs_unfinished",
    eval_runs.c.position,
    sqlite_where=UNFINISHED_RUN,
    postgresql_where=UNFINISHED_RUN,
)

eval_items = Table(
    "eval_items",
    metadata,
    _position(),
    _id(),
    _project(),
    Column("run_id", ForeignKey("eval_runs.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    # Its place in the source.
    Column("number", Integer, nullable=False),
    # OpenAI's words: pass, fail; and error.
    Column("status", StorableText, nullable=False),
    Column("item", StorableJson, nullable=False),
    Column("sample", StorableJson, nullable=False),
    Column("results", StorableJson, nullable=False),
    UniqueConstraint("run_id", "number"),
    sqlite_autoincrement=True,
)
Index(None, eval_items.c.run_id, eval_items.c.position)
Index(None, eval_items.c.project_id)
