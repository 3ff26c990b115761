"""API keys of projects, and temporary substitutes for a key: browser sessions and sign-in links."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

from sqlalchemy import Connection, and_, case, delete, exists, func, insert, or_, select, update

from ft_service.errors import AuthError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.store.database import Database, StorePart, database_time
from ft_service.store.records import ApiKey, NewKey, Principal
from ft_service.store.rows import KEY, not_found
from ft_service.store.tables import audit, keys, projects, sessions
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.projects import THERE, limits_of

log = logging.getLogger(__name__)

PREFIX = "key_"
SECRET_BYTES = 32
MIN_SECRET_CHARACTERS = 20
SHOWN_CHARACTERS = 8
LAST_USED_SECONDS = 60.0
"""Allowed delay of `last_used_at`: a write for every request would cost more than the request."""
SESSION_SECONDS = 24 * 3600.0
"""Lifetime of a session from sign-in on; use does not extend it."""
LINK_SECONDS = 15 * 60.0
"""Lifetime of an unused link."""
PERSON_DAYS = 30.0
"""Days after a person's last sign-in for which keys that they made work, unless the settings say
otherwise.
"""
DAY_SECONDS = 86_400.0

LOGIN_MARK = "ft-login-"
"""The beginning of the secret of a person's sign-in on the command line."""

Kind = Literal["session", "login", "link", "state"]
"""login: a person's, on the command line (`ft login`). state: of a sign-in through the provider
that was carried out, so that it is not carried out twice.
"""
_ROTATED = "key.rotated"
_PRINCIPAL = (
    *(keys.c.id, keys.c.project_id, keys.c.scope, keys.c.identity, keys.c.ends_with),
    *(projects.c.organization, projects.c.max_slots, projects.c.limits),
)


class KeyStore(StorePart):
    """API keys."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._used_keys = _UsedKeys(self._mark_used)
        self.max_days: float | None = None
        """Longest life of a key that is made from now on (FT_MAX_KEY_DAYS); None: no limit."""
        self.person_days = PERSON_DAYS
        """Days after a person's last sign-in for which keys that they made work
        (FT_OIDC_KEY_DAYS).
        """

    def close(self) -> None:
        """Store the last uses of keys that are not stored yet."""
        self._used_keys.finish()

    def has_keys(self) -> bool:
        """Whether any key was ever created in any project."""
        with self._database.reading() as connection:
            return connection.scalars(select(exists().select_from(keys))).one()

    def create_key(
        self, new: NewKey, *, made_by: Principal | None = None, param: str = "expires_days"
    ) -> tuple[ApiKey, str]:
        """Create a key. Returns it with its secret, which is not stored.

        `made_by`: None: the operator; a key that a person makes by single sign-on ends with the
        person's access. `param`: the field that gave `expires_at`.

        Raises NotFoundError for an unknown project, SpecError for a short secret or a longer life
        than FT_MAX_KEY_DAYS allows, ConflictError for
        a secret or an id that is in use, and AuthError if the person's access has ended meanwhile.
        """
        if new.secret is not None and len(new.secret) < MIN_SECRET_CHARACTERS:
            raise SpecError(
                f"The key has {len(new.secret)} characters; give it at least "
                f"{MIN_SECRET_CHARACTERS}.",
                param="secret",
            )
        mine = select(projects.c.id).where(projects.c.id == new.project_id, THERE)
        with self._database.writing() as connection:
            if connection.scalars(mine).one_or_none() is None:
                raise NotFoundError(f"There is no project {new.project_id!r}.")
            new = replace(new, expires_at=self._end_of(connection, new, param))
            person = None if made_by is None else _living_person(connection, made_by)
            key, secret = self._insert(connection, new, person)
            what = {"name": new.name, "scope": new.scope}
            record(connection, new.project_id, "key.created", key.id, **what)
        return key, secret

    def rotate_key(
        self, project_id: str, key_id: str, *, keep_seconds: float
    ) -> tuple[ApiKey, str]:
        """Create a key with the name and scope of another, which stays valid for `keep_seconds`.

        Returns the new key and its secret. Raises SpecError for a revoked or expired key.
        """
        with self._database.writing() as connection:
            old, now = _rotatable(connection, project_id, key_id)
            new = NewKey(
                project_id=project_id,
                name=old.name,
                scope=old.scope,
                expires_at=self._end_of_successor(connection, old, now),
            )
            if old.ends_with is not None:
                _lock_person(connection, old.ends_with)
            _end_by(connection, old, now + keep_seconds)
            key, secret = self._insert(connection, new, old.ends_with)
            record(connection, project_id, _ROTATED, key_id, replaced_by=key.id)
        return key, secret

    def end_old_keys(self) -> int:
        """Let keys that were made earlier end too once they are as old as any may become, and
        return how many would have lived longer. Keys for metrics and people's rows are left.
        """
        if self.max_days is None:
            return 0
        end = keys.c.created_at + self._longest_seconds
        own_end = case((keys.c.ends_with.is_(None), keys.c.expires_at), else_=keys.c.latest_end)
        longer = and_(
            keys.c.identity.is_(None),
            keys.c.revoked_at.is_(None),
            keys.c.scope != "metrics",
            or_(own_end.is_(None), own_end > end + 1.0),
        )
        earlier = case((keys.c.expires_at < end, keys.c.expires_at), else_=end)
        statement = update(keys).where(longer).values(expires_at=earlier, latest_end=end)
        with self._database.writing() as connection:
            ended = connection.execute(statement.returning(keys.c.project_id, keys.c.id)).all()
            for row in ended:
                record(connection, row.project_id, "key.end_set", row.id, max_days=self.max_days)
        return len(ended)

    @property
    def _longest_seconds(self) -> float:
        return (self.max_days or 0.0) * DAY_SECONDS

    def _insert(
        self, connection: Connection, new: NewKey, person: str | None
    ) -> tuple[ApiKey, str]:
        """Store a key that ends by itself at its `expires_at`, None: never, or with a person's
        access. Return it with its secret.
        """
        secret = new.secret or _new_secret()
        row = {
            "id": new.id or new_id(PREFIX),
            "project_id": new.project_id,
            "name": new.name,
            "scope": new.scope,
            "prefix": secret[:SHOWN_CHARACTERS],
            "digest": digest_of(secret),
            "created_at": database_time(),
            **self._life(connection, new.expires_at, person),
        }
        statement = insert(keys).values(row).returning(*KEY)
        return ApiKey(**connection.execute(statement).mappings().one()), secret

    def _life(
        self, connection: Connection, end: float | None, person: str | None
    ) -> dict[str, Any]:
        """Return the columns that say when a new key ends, as for `_insert`."""
        if person is None:
            return {"expires_at": end}
        signed_in = func.coalesce(keys.c.signed_in_at, keys.c.expires_at)
        row = connection.execute(select(signed_in.label("at")).where(keys.c.id == person)).one()
        until = row.at + self.person_days * DAY_SECONDS
        earlier = until if end is None else min(end, until)
        return {"expires_at": earlier, "ends_with": person, "latest_end": end}

    def _longest_end(self, now: float, scope: str) -> float | None:
        """When a key that is made now has to end; None: never."""
        if self.max_days is None or scope == "metrics":
            return None
        return now + self._longest_seconds

    def _end_of_successor(self, connection: Connection, old: ApiKey, now: float) -> float | None:
        """When the key that replaces another ends by itself; None: never."""
        end = _created_to_expire(connection, old)
        longest = self._longest_end(now, old.scope)
        if longest is None or (
            end is not None and end - old.created_at <= self._longest_seconds - 1.0
        ):
            return end
        return longest  # of a life as long as any may be, which begins anew

    def _end_of(self, connection: Connection, new: NewKey, param: str) -> float | None:
        """When a new key ends. Raises SpecError if it is to live longer than any may."""
        asked = new.expires_at
        now = connection.scalars(select(database_time())).one()
        longest = self._longest_end(now, new.scope)
        if longest is None or asked is None:
            return longest if asked is None else asked
        if asked > longest + 1.0:
            raise SpecError(
                f"{param}: the key would live {(asked - now) / DAY_SECONDS:g} days, and the operator "
                f"allows {self.max_days:g} (FT_MAX_KEY_DAYS). Give at most that, and rotate the key "
                "before it ends.",
                param=param,
            )
        return asked

    def replace_secret(self, project_id: str, key_id: str) -> tuple[ApiKey, str] | None:
        """Give a key that was never used another secret, since nobody has seen the first.

        None: it was used, or revoked.
        """
        secret = _new_secret()
        unused = (
            keys.c.last_used_at.is_(None),
            keys.c.revoked_at.is_(None),
            keys.c.identity.is_(None),
        )
        statement = (
            update(keys)
            .where(keys.c.id == key_id, keys.c.project_id == project_id, *unused)
            .values(digest=digest_of(secret), prefix=secret[:SHOWN_CHARACTERS])
            .returning(*KEY)
        )
        with self._database.writing() as connection:
            row = connection.execute(statement).mappings().one_or_none()
            if row is None:
                return None
            record(connection, project_id, "key.secret_replaced", key_id)
        return ApiKey(**row), secret

    def get_key(self, project_id: str, key_id: str) -> ApiKey:
        with self._database.reading() as connection:
            query = select(*KEY).where(keys.c.id == key_id, keys.c.project_id == project_id)
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise not_found("key", key_id)
        return ApiKey(**row)

    def list_keys(self, project_id: str) -> list[ApiKey]:
        """A project's keys, oldest first, with revoked and expired ones."""
        query = (
            select(*KEY)
            .where(keys.c.project_id == project_id)
            .order_by(keys.c.created_at, keys.c.id)
        )
        with self._database.reading() as connection:
            return [ApiKey(**row) for row in connection.execute(query).mappings()]

    def revoke_key(self, project_id: str, key_id: str) -> ApiKey:
        """Revoke a key, and with a person's key those that the person made. Repeating it changes
        nothing.
        """
        mine = (keys.c.id == key_id, keys.c.project_id == project_id)
        statement = update(keys).where(*mine, keys.c.revoked_at.is_(None))
        with self._database.writing() as connection:
            if connection.execute(statement.values(revoked_at=database_time())).rowcount:
                record(connection, project_id, "key.revoked", key_id)
            row = connection.execute(select(*KEY).where(*mine)).mappings().one_or_none()
            if row is None:
                raise not_found("key", key_id)
            revoke_with(connection, keys.c.ends_with == key_id)
        return ApiKey(**row)

    def authenticate(self, secret: str) -> Principal | None:
        """The holder of a key's secret, or of a login's; None if it is unknown, revoked or expired.
        It only reads: a thread stores that the key was used, unless the database cannot be written.
        """
        digest = digest_of(secret)
        if secret.startswith(LOGIN_MARK):
            with self._database.reading() as connection:
                return holder_of(connection, digest, "login")
        query = (
            select(
                keys,
                projects.c.organization,
                projects.c.max_slots,
                projects.c.limits,
                database_time().label("now"),
            )
            .join(projects)
            .where(
                keys.c.digest == digest,
                keys.c.revoked_at.is_(None),
                projects.c.archived_at.is_(None),
                or_(keys.c.expires_at.is_(None), keys.c.expires_at > database_time()),
            )
        )
        with self._database.reading() as connection:
            row = connection.execute(query).one_or_none()
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        if row.last_used_at is None or row.last_used_at <= row.now - LAST_USED_SECONDS:
            self._used_keys.note(row.id)
        return _principal(row)

    def _mark_used(self, key_ids: Collection[str]) -> None:
        with self._database.writing() as connection:
            connection.execute(
                update(keys).where(keys.c.id.in_(key_ids)).values(last_used_at=database_time())
            )


class _UsedKeys:
    """Keys whose use is still to be stored, by a thread, so that requests neither wait for that nor
    fail with it.
    """

    def __init__(self, write: Callable[[Collection[str]], None]) -> None:
        self._write = write
        self._waiting: set[str] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._not_before = float("-inf")
        self._failing = False

    def note(self, key_id: str) -> None:
        """Note that a key was used.

        After a failure, further uses are ignored for LAST_USED_SECONDS.
        """
        with self._lock:
            if time.monotonic() < self._not_before:
                return
            self._waiting.add(key_id)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="key use", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until the noted uses are stored, or storing them has failed."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                used = self._waiting
                self._waiting = set()
                if not used:
                    self._thread = None
                    return
            try:
                self._write(used)
                self._failing = False
            except Exception as error:
                if not self._failing:
                    log.warning(
                        "the use of keys is not noted (last_used_at) while this lasts: %s", error
                    )
                self._failing = True
                with self._lock:
                    self._not_before = time.monotonic() + LAST_USED_SECONDS


class SessionStore(StorePart):
    """Sessions and links. Only digests of their random secrets are stored, so that a reader of the
    database cannot use them.
    """

    def open_session(self, holder: Principal) -> str:
        """Create a session for a key's holder. Returns its secret, which is not stored."""
        return self._add("session", holder, SESSION_SECONDS)

    def new_link(self, holder: Principal) -> str:
        """Create a secret that `follow_link` accepts once."""
        return self._add("link", holder, LINK_SECONDS)

    def follow_link(self, secret: str) -> Principal | None:
        """Use up a link. Returns its holder; None if it is unknown, used or expired, or its key is
        not valid.
        """
        digest = digest_of(secret)
        with self._database.writing() as connection:
            holder = holder_of(connection, digest, "link")
            used = connection.execute(
                delete(sessions).where(sessions.c.digest == digest, sessions.c.kind == "link")
            )
        return holder if used.rowcount == 1 else None  # of two concurrent uses, one succeeds

    def session_holder(self, secret: str) -> Principal | None:
        """The holder of a session; None if it is unknown, ended or expired, or its key was revoked
        or has expired.
        """
        with self._database.reading() as connection:
            return holder_of(connection, digest_of(secret), "session")

    def end_session(self, secret: str) -> None:
        """End a session. Repeating it changes nothing."""
        with self._database.writing() as connection:
            connection.execute(delete(sessions).where(sessions.c.digest == digest_of(secret)))

    def _add(self, kind: Kind, holder: Principal, seconds: float) -> str:
        secret = secrets.token_urlsafe(SECRET_BYTES)
        with self._database.writing() as connection:
            add_session(
                connection,
                kind,
                secret,
                holder.project_id,
                holder.key_id,
                database_time() + seconds,
            )
        return secret


def add_session(
    connection: Connection, kind: Kind, secret: str, project_id: str, key_id: str, expires_at: Any
) -> None:
    """Store a row of `sessions`, and remove those that are over.

    Raises IntegrityError if the secret is stored already.
    """
    connection.execute(delete(sessions).where(sessions.c.expires_at <= database_time()))
    row = {"digest": digest_of(secret), "kind": kind, "project_id": project_id, "key_id": key_id}
    connection.execute(
        insert(sessions).values(**row, created_at=database_time(), expires_at=expires_at)
    )


def holder_of(connection: Connection, digest: str, kind: Kind) -> Principal | None:
    query = (
        select(*_PRINCIPAL)
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


def revoke_with(connection: Connection, which: Any) -> list[ApiKey]:
    """Revoke those of the keys that end with a person's access for which `which` holds, and return
    them.
    """
    statement = (
        update(keys)
        .where(keys.c.ends_with.is_not(None), keys.c.revoked_at.is_(None), which)
        .values(revoked_at=database_time())
    )
    found = connection.execute(statement.returning(*KEY)).mappings()
    revoked = [ApiKey(**row) for row in found.all()]
    for key in revoked:
        record(connection, key.project_id, "key.revoked", key.id, ended_with=key.ends_with)
    return revoked


def _living_person(connection: Connection, caller: Principal) -> str | None:
    """Return the id of the key that stands for the person who the caller is, or whose key it has;
    None: no person. Until the transaction's end, that person's access cannot end.

    Raises AuthError if it has ended.
    """
    if caller.person is None:
        return None
    _lock_person(connection, caller.person)
    still = select(keys.c.id).where(
        keys.c.id == caller.key_id,
        keys.c.revoked_at.is_(None),
        or_(keys.c.expires_at.is_(None), keys.c.expires_at > database_time()),
    )
    if connection.scalars(still).one_or_none() is None:
        raise AuthError("Your access has ended. Sign in again.", code="session_over")
    return caller.person


def _lock_person(connection: Connection, person: str) -> None:
    connection.execute(select(keys.c.id).where(keys.c.id == person).with_for_update())


def _rotatable(connection: Connection, project_id: str, key_id: str) -> tuple[ApiKey, float]:
    """Return a key that may be rotated, and the time. Raises as `KeyStore.rotate_key`."""
    query = select(*KEY, database_time().label("now"))
    mine = query.where(keys.c.id == key_id, keys.c.project_id == project_id)
    row = connection.execute(mine).mappings().one_or_none()
    if row is None:
        raise not_found("key", key_id)
    values = dict(row)
    now = values.pop("now")
    key = ApiKey(**values)
    if key.identity is not None:
        message = (
            f"Key {key_id} stands for a person who signs in by single sign-on: it "
            "has no secret to replace."
        )
        raise SpecError(message, param="key_id", code="invalid_state")
    if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
        raise _over(key_id)
    return key, now


def _end_by(connection: Connection, key: ApiKey, latest: float) -> None:
    """Let a key end at `latest`, or earlier if it ends earlier. Raises SpecError if it was revoked
    meanwhile.
    """
    end = latest if key.expires_at is None else min(key.expires_at, latest)
    statement = update(keys).where(keys.c.id == key.id, keys.c.revoked_at.is_(None))
    if not connection.execute(statement.values(expires_at=end, latest_end=end)).rowcount:
        raise _over(key.id)


def _over(key_id: str) -> SpecError:
    return SpecError(
        f"Key {key_id} opens nothing any more: create a new one.",
        param="key_id",
        code="invalid_state",
    )


def _principal(row: Any) -> Principal:
    return Principal(
        key_id=row.id,
        project_id=row.project_id,
        organization=row.organization,
        scope=row.scope,
        limits=limits_of(row.max_slots, row.limits),
        identity=row.identity,
        ends_with=row.ends_with,
    )


def _new_secret() -> str:
    return f"ft-{secrets.token_urlsafe(SECRET_BYTES)}"


def _created_to_expire(connection: Connection, key: ApiKey) -> float | None:
    """When a key was to end by itself before it was rotated: as the one that replaced it, of which
    the audit log knows. A key that is rotated again, as when the first answer was lost, must not
    have a successor that ends with it.
    """
    key_id = key.id
    end = key.own_end
    replacing = select(audit.c.detail).where(
        audit.c.project_id == key.project_id, audit.c.type == _ROTATED
    )
    replacing = replacing.order_by(audit.c.position).limit(1)
    while (
        detail := connection.scalars(replacing.where(audit.c.target == key_id)).one_or_none()
    ) is not None:
        key_id = detail["replaced_by"]
        row = connection.execute(select(*KEY).where(keys.c.id == key_id)).mappings().one()
        end = ApiKey(**row).own_end
    return end


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
