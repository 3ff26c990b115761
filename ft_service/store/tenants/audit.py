"""The record of changes: what was changed, by which key, from where. Written in the transaction that changes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select

from ft_service.ids import new_id
from ft_service.store.database import Database, database_time
from ft_service.store.records import AuditEntry, Page
from ft_service.store.rows import columns_of, cursor, page
from ft_service.store.tables import projects
from ft_service.store.tenants.tables import audit

ENTRY = columns_of(AuditEntry, audit)


@dataclass(frozen=True)
class Actor:
    """Who changes something."""

    key_id: str | None = None
    address: str | None = None
    """Of the connection: a proxy's, behind one."""


_actor: ContextVar[Actor] = ContextVar("actor", default=Actor())  # noqa: B039  # frozen


def act_as(actor: Actor) -> None:
    """From now on what this task, and threads that it waits for, changes was changed by this actor."""
    _actor.set(actor)


@contextlib.contextmanager
def acting(actor: Actor) -> Iterator[None]:
    before = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(before)


def acting_key() -> str | None:
    """The key by which something is changed now."""
    return _actor.get().key_id


def record(connection: Connection, project_id: str, what: str, target: str, **detail: Any) -> None:
    """Note a change. `what`: `key.created`; `target`: the id of what was changed; `detail`: never a secret."""
    row = {"id": new_id("audit_log-"), "project_id": project_id, "type": what, "target": target, "detail": detail or None}
    actor = _actor.get()
    values = {**row, "key_id": actor.key_id, "address": actor.address, "created_at": database_time()}
    connection.execute(insert(audit).values(values))


class AuditStore(Database):
    """The record of changes, to read."""

    def list_audit(
        self, *, project_id: str | None = None, organization: str | None = None, after: str | None = None, limit: int = 20
    ) -> Page[AuditEntry]:
        """Newest first: of one project, or of all of an organisation; neither: of all."""
        query = select(*ENTRY).order_by(audit.c.position.desc())
        mine = [audit.c.project_id == project_id] if project_id else []
        if organization:
            mine.append(audit.c.project_id.in_(select(projects.c.id).where(projects.c.organization == organization)))
        with self.reading() as connection:
            if after is not None:
                query = query.where(
                    audit.c.position < cursor(connection, audit.c.position, audit.c.id == after, *mine, after=after)
                )
            return page(connection, query.where(*mine), limit, lambda row: AuditEntry(**row))
