"""Tables of changes, use, requests and browsers' sessions, beside those of projects and keys (ft_service/store/tables.py)."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Integer, Table

from ft_service.store.database import StorableJson, StorableText
from ft_service.store.tables import metadata

# Rows are only ever added.
audit = Table(
    "audit",
    metadata,
    Column("position", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", StorableText, nullable=False, unique=True),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
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
    # Empty: not known, as for jobs of earlier versions.
    Column("key_id", StorableText, primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    # In steps of 1/1024 s, so that sums are exact.
    Column("slot_seconds", Double, nullable=False, server_default="0"),
    Column("tokens", BigInteger, nullable=False, server_default="0"),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Column("jobs", Integer, nullable=False, server_default="0"),
)

# How many requests projects send, where several servers share that: when the bucket is full again, and what the last one who
# drew from it got.
request_rates = Table(
    "request_rates",
    metadata,
    Column("project_id", ForeignKey("projects.id"), primary_key=True),
    Column("full_at", Double, nullable=False),
    Column("taken", BigInteger, nullable=False),
)

# Browsers that are signed in, and links that sign in once. Only digests are kept; a row that is gone opens nothing.
sessions = Table(
    "sessions",
    metadata,
    Column("digest", StorableText, primary_key=True),
    # "session" or "link".
    Column("kind", StorableText, nullable=False),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
    Column("key_id", ForeignKey("keys.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
)
Index(None, sessions.c.expires_at)
