"""Tables of hosts and of what runs on them, beside those of jobs and slots (ft_service/store/tables.py)."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Integer, Table

from ft_service.store.database import StorableText
from ft_service.store.tables import metadata

# Places where attempts run, each told of by its own reconciler; and hosts, each told of by its agent. They are no project's.
hosts = Table(
    "hosts",
    metadata,
    Column("host", StorableText, primary_key=True),
    Column("slots", Integer, nullable=False),
    Column("seen_at", Double, nullable=False),
    # Of a host with an agent: whose launcher uses it. All that follows is NULL for other hosts.
    Column("place", StorableText),
    # By which other hosts reach it.
    Column("address", StorableText),
    # Of its processors, as the driver names them.
    Column("kind", StorableText),
    Column("gpus", Integer),
    # Bytes of one GPU; without GPUs of the host.
    Column("memory", BigInteger),
    # Drawn by each agent that starts: the newest has the host.
    Column("agent", StorableText),
    # Since when nothing is placed there any more.
    Column("drained_at", Double),
    Column("joined_at", Double),
)

# What agents are asked to run: one row for each node of an attempt that is not over.
attempt_nodes = Table(
    "attempt_nodes",
    metadata,
    Column("job_id", ForeignKey("jobs.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("node", Integer, primary_key=True, autoincrement=False),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
    Column("host", StorableText, nullable=False),
    # "run" or "end".
    Column("wanted", StorableText, nullable=False),
    # "ordered", "running" or "ended", as the host's agent has reported.
    Column("state", StorableText, nullable=False),
    # HOST:PORT where node 0 waits for the others; NULL: it has not said.
    Column("endpoint", StorableText),
    # Why it could not be started.
    Column("fault", StorableText),
)
Index(None, attempt_nodes.c.host)
