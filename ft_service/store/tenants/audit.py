"""The audit log: what was changed, with which key, from where.

Entries are written in the transaction of the change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from ft_service.ids import new_id
from ft_service.store.database import AUDITED, StorePart, database_time
from ft_service.store.records import AuditEntry, Page
from ft_service.store.rows import Listing, columns_of, page
from ft_service.store.tables import audit, projects

ENTRY = columns_of(AuditEntry, audit)
_AT_ONCE = 1000
"""Entries that are removed in one transaction."""


@dataclass(frozen=True)
class Actor:
    """Key and address of the client that makes a change."""

    key_id: str | None = None
    address: str | None = None
    """Peer address of the connection, which may be a proxy's."""


_actor: ContextVar[Actor] = ContextVar("actor", default=Actor())  # noqa: B039  # frozen


def act_as(actor: Actor) -> None:
    """Attribute all further changes of this task, and of threads that it waits for, to an actor."""
    _actor.set(actor)


@contextlib.contextmanager
def acting(actor: Actor) -> Iterator[None]:
    """Attribute changes within the block to an actor."""
    before = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(before)


def acting_key() -> str | None:
    """The current actor's key, if any."""
    return _actor.get().key_id


def record(connection: Connection, project_id: str, what: str, target: str, **detail: Any) -> None:
    """Add an entry for a change.

    `what`: such as `key.created`; `target`: id of the changed object; `detail`: never a secret.
    """
    row = {
        "id": new_id("audit_log-"),
        "project_id": project_id,
        "type": what,
        "target": target,
        "detail": detail or None,
    }
    actor = _actor.get()
    values = {
        **row,
        "key_id": actor.key_id,
        "address": actor.address,
        "created_at": database_time(),
    }
    connection.execute(insert(audit).values(values))
    entry = values | {"created_at": time.time()}
    connection.info.setdefault(AUDITED, []).append(entry)


class AuditStore(StorePart):
    """The audit log by itself."""

    def note(self, project_id: str, what: str, target: str, **detail: Any) -> None:
        """Add an entry for a change outside of the database, as `record`."""
        with self._database.writing() as connection:
            record(connection, project_id, what, target, **detail)

    def list_audit(
        self,
        *,
        project_id: str | None = None,
        organization: str | None = None,
        after: str | None = None,
        limit: int = 20,
    ) -> Page[AuditEntry]:
        """Entries of a project, or of all projects of an organisation, or of all; newest first."""
        mine = [audit.c.project_id == project_id] if project_id else []
        if organization:
            mine.append(
                audit.c.project_id.in_(
                    select(projects.c.id).where(projects.c.organization == organization)
                )
            )
        with self._database.reading() as connection:
            query = Listing(audit.c.position, audit.c.id, mine).apply(
                connection, select(*ENTRY).where(*mine), after
            )
            return page(connection, query, limit, lambda row: AuditEntry(**row))

    def forget_audit(self, older_than_seconds: float) -> None:
        """Remove entries older than this, from the oldest on."""
        oldest = (
            select(audit.c.position, audit.c.created_at)
            .order_by(audit.c.position)
            .limit(_AT_ONCE)
            .subquery()
        )
        old = select(oldest.c.position).where(
            oldest.c.created_at <= database_time() - older_than_seconds
        )
        removed = _AT_ONCE
        while removed == _AT_ONCE:
            with self._database.writing(makes_room=True) as connection:
                removed = connection.execute(
                    delete(audit).where(audit.c.position.in_(old))
                ).rowcount
