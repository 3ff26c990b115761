"""Keys, which let somebody act in a project, and what stands for a key for a while: sessions of browsers, and links."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Literal

from sqlalchemy import Connection, delete, exists, func, insert, or_, select, update

from ft_service.errors import NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.store.database import Database, database_time
from ft_service.store.records import ApiKey, Principal, Scope
from ft_service.store.rows import KEY, not_found, to_key
from ft_service.store.tables import keys, projects
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.projects import limits_of
from ft_service.store.tenants.tables import sessions

log = logging.getLogger(__name__)

SECRET_BYTES = 32
MIN_SECRET_CHARACTERS = 20
SHOWN_CHARACTERS = 8
LAST_USED_SECONDS = 60.0
"""How stale `last_used_at` may be: a write for every request would cost more than the request."""
SESSION_SECONDS = 24 * 3600.0
"""Life of a session, from sign-in on; it is not prolonged."""
LINK_SECONDS = 15 * 60.0
"""Life of a link that nobody follows."""

Kind = Literal["session", "link"]


class KeyStore(Database):
    """Keys."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._marks = _Marks(self._mark_used)

    def close(self) -> None:
        self._marks.finish()
        super().close()

    def has_keys(self) -> bool:
        """Whether any key was ever made, in any project: a service without one needs its first."""
        with self.reading() as connection:
            return connection.scalars(select(exists().select_from(keys))).one()

    def create_key(
        self, *, project_id: str, name: str, scope: Scope, expires_at: float | None = None, secret: str | None = None
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is never seen again. `secret`: one from elsewhere; None: a random one.

        Raises NotFoundError without such a project, SpecError for a short secret, ConflictError for one that is in use.
        """
        if secret is None:
            secret = f"ft-{secrets.token_urlsafe(SECRET_BYTES)}"
        if len(secret) < MIN_SECRET_CHARACTERS:
            raise SpecError(f"The key has {len(secret)} characters; give it at least {MIN_SECRET_CHARACTERS}.", param="secret")
        with self.writing() as connection:
            if connection.scalars(select(projects.c.id).where(projects.c.id == project_id)).one_or_none() is None:
                raise NotFoundError(f"There is no project {project_id!r}.")
            key = _insert(connection, project_id, name, scope, secret, expires_at)
            record(connection, project_id, "key.created", key.id, name=name, scope=scope)
        return key, secret

    def rotate_key(self, project_id: str, key_id: str, *, keep_seconds: float) -> tuple[ApiKey, str]:
        """A new key in place of another, of its name and scope, and its secret. The old one goes on for `keep_seconds`, so that
        whoever uses it has time to change. Raises SpecError for a key that opens nothing any more."""
        secret = f"ft-{secrets.token_urlsafe(SECRET_BYTES)}"
        mine = (keys.c.id == key_id, keys.c.project_id == project_id)
        with self.writing() as connection:
            row = connection.execute(select(*KEY, database_time().label("now")).where(*mine)).mappings().one_or_none()
            if row is None:
                raise not_found("key", key_id)
            values = dict(row)
            now = values.pop("now")
            old = ApiKey(**values)
            if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
                raise SpecError(f"Key {key_id} opens nothing any more: create a new one.", param="key_id", code="invalid_state")
            ends = now + keep_seconds if old.expires_at is None else min(old.expires_at, now + keep_seconds)
            connection.execute(update(keys).where(*mine).values(expires_at=ends))
            key = _insert(connection, project_id, old.name, old.scope, secret, old.expires_at)
            record(connection, project_id, "key.rotated", key_id, replaced_by=key.id)
        return key, secret

    def get_key(self, project_id: str, key_id: str) -> ApiKey:
        with self.reading() as connection:
            query = select(*KEY).where(keys.c.id == key_id, keys.c.project_id == project_id)
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise not_found("key", key_id)
        return to_key(row)

    def list_keys(self, project_id: str) -> list[ApiKey]:
        """Oldest first, revoked and expired ones too."""
        query = select(*KEY).where(keys.c.project_id == project_id).order_by(keys.c.created_at, keys.c.id)
        with self.reading() as connection:
            return [to_key(row) for row in connection.execute(query).mappings()]

    def revoke_key(self, project_id: str, key_id: str) -> ApiKey:
        """From now on the key opens nothing. Repeating it changes nothing."""
        statement = (
            update(keys)
            .where(keys.c.id == key_id, keys.c.project_id == project_id)
            .values(revoked_at=func.coalesce(keys.c.revoked_at, database_time()))
            .returning(*KEY)
        )
        with self.writing() as connection:
            row = connection.execute(statement).mappings().one_or_none()
            if row is None:
                raise not_found("key", key_id)
            record(connection, project_id, "key.revoked", key_id)
        return to_key(row)

    def authenticate(self, secret: str) -> Principal | None:
        """Who holds this secret; None if nobody does (unknown, revoked, expired). Only reads: that the key was used is written
        by a thread, and not at all while nothing can be written."""
        digest = _digest(secret)
        query = (
            select(keys, projects.c.organization, projects.c.max_slots, projects.c.limits, database_time().label("now"))
            .join(projects)
            .where(
                keys.c.digest == digest,
                keys.c.revoked_at.is_(None),
                projects.c.archived_at.is_(None),
                or_(keys.c.expires_at.is_(None), keys.c.expires_at > database_time()),
            )
        )
        with self.reading() as connection:
            row = connection.execute(query).one_or_none()
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        if row.last_used_at is None or row.last_used_at <= row.now - LAST_USED_SECONDS:
            self._marks.note(row.id)
        return _principal(row)

    def _mark_used(self, key_ids: Collection[str]) -> None:
        with self.writing() as connection:
            connection.execute(update(keys).where(keys.c.id.in_(key_ids)).values(last_used_at=database_time()))


class _Marks:
    """Keys that were used, until that is written: whoever used them does not wait for it, and does not fail with it."""

    def __init__(self, write: Callable[[Collection[str]], None]) -> None:
        self._write = write
        self._waiting: set[str] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._not_before = float("-inf")
        self._failing = False

    def note(self, key_id: str) -> None:
        """A key was used. After a failure others are not noted for LAST_USED_SECONDS."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return
            self._waiting.add(key_id)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="key use", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until what was noted is written, or has failed."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                used, self._waiting = self._waiting, set()
                if not used:
                    self._thread = None
                    return
            try:
                self._write(used)
                self._failing = False
            except Exception as error:
                if not self._failing:
                    log.warning("the use of keys is not noted (last_used_at) while this lasts: %s", error)
                self._failing = True
                with self._lock:
                    self._not_before = time.monotonic() + LAST_USED_SECONDS


class SessionStore(Database):
    """Sessions and links. Secrets are random and kept as digests; whoever reads the database can use none."""

    def open_session(self, holder: Principal) -> str:
        """A new session of a key's holder. Returns its secret, which is never seen again."""
        return self._add("session", holder, SESSION_SECONDS)

    def new_link(self, holder: Principal) -> str:
        """A new secret that `follow_link` takes once."""
        return self._add("link", holder, LINK_SECONDS)

    def follow_link(self, secret: str) -> Principal | None:
        """Whose link this is, which is used up by this; None: nobody's (unknown, used, expired, or its key opens nothing)."""
        digest = _digest(secret)
        with self.writing() as connection:
            holder = _holder(connection, digest, "link")
            used = connection.execute(delete(sessions).where(sessions.c.digest == digest, sessions.c.kind == "link"))
        return holder if used.rowcount == 1 else None  # of two who follow it at once, one

    def session_holder(self, secret: str) -> Principal | None:
        """Whose session this is; None: nobody's (unknown, ended, expired, or its key was revoked or has expired)."""
        with self.reading() as connection:
            return _holder(connection, _digest(secret), "session")

    def end_session(self, secret: str) -> None:
        """From now on the secret opens nothing. Repeating it changes nothing."""
        with self.writing() as connection:
            connection.execute(delete(sessions).where(sessions.c.digest == _digest(secret)))

    def _add(self, kind: Kind, holder: Principal, seconds: float) -> str:
        secret = secrets.token_urlsafe(SECRET_BYTES)
        row = {"digest": _digest(secret), "kind": kind, "project_id": holder.project_id, "key_id": holder.key_id}
        with self.writing() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= database_time()))
            times = {"created_at": database_time(), "expires_at": database_time() + seconds}
            connection.execute(insert(sessions).values(**row, **times))
        return secret


def _holder(connection: Connection, digest: str, kind: Kind) -> Principal | None:
    query = (
        select(keys.c.id, keys.c.project_id, keys.c.scope, projects.c.organization, projects.c.max_slots, projects.c.limits)
        .join_from(sessions, keys, sessions.c.key_id == keys.c.id)
        .join(projects, projects.c.id == keys.c.project_id)
        .where(
            sessions.c.digest == digest,
            sessions.c.kind == kind,
            sessions.c.expires_at > database_time(),
            keys.c.revoked_at.is_(None),
            projects.c.archived_at.is_(None),
            or_(keys.c.expires_at.is_(None), keys.c.expires_at > database_time()),
        )
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    return _principal(row)


def _principal(row: Any) -> Principal:
    return Principal(
        key_id=row.id,
        project_id=row.project_id,
        organization=row.organization,
        scope=row.scope,
        limits=limits_of(row.max_slots, row.limits),
    )


def _insert(connection: Connection, project_id: str, name: str, scope: Scope, secret: str, expires_at: float | None) -> ApiKey:
    row = {
        "id": new_id("key_"),
        "project_id": project_id,
        "name": name,
        "scope": scope,
        "prefix": secret[:SHOWN_CHARACTERS],
        "digest": _digest(secret),
        "created_at": database_time(),
        "expires_at": expires_at,
    }
    return to_key(connection.execute(insert(keys).values(row).returning(*KEY)).mappings().one())


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
