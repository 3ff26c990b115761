"""People who sign in by single sign-on.

A person has a row among the keys of each project that the groups open.

No secret opens such a key; sessions do. It is valid until the provider has to be asked again, so
that a person whose groups were taken away is out by then, in every browser.

Keys that a person makes end with the person's access: at once by a sign-in that finds the groups
gone or worth less than the key's scope, and when the row is revoked; else so many days after the
last sign-in, until the next one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, and_, case, or_, select, update
from sqlalchemy.exc import IntegrityError

from ft_service.errors import AuthError, ForbiddenError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.records import ApiKey, Scope
from ft_service.store.rows import KEY
from ft_service.store.tables import LIVING_PERSON, keys, projects, sessions
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.keys import (
    DAY_SECONDS,
    LOGIN_MARK,
    PERSON_DAYS,
    SECRET_BYTES,
    Kind,
    add_session,
    digest_of,
    revoke_with,
)
from ft_service.store.tenants.projects import THERE

SIGN_ON_MARK = "sso."
"""The beginning of a session's secret that single sign-on has opened."""
STATE_SECONDS = 600.0
"""Time that a person has at the provider."""
_PREFIX = "sign-on"
_LIVING = and_(keys.c.identity.is_not(None), keys.c.revoked_at.is_(None))
_WITHIN: dict[Scope, tuple[Scope, ...]] = {
    "submit": ("submit", "user", "read"),
    "user": ("submit", "user", "read"),
    "read": ("read",),
}
"""Scopes of keys that a person of a scope may have. Admins may have all, in other projects too."""


@dataclass(frozen=True, kw_only=True)
class SignOn:
    """What the provider says of a person who signs in."""

    identity: str
    """Issuer and subject."""
    name: str
    grants: Mapping[str, Scope]
    """Project → scope."""
    state: str
    """Secret of this one sign-in, which is carried out once."""


@dataclass(frozen=True)
class Login:
    """A person's sign-in on the command line."""

    secret: str
    project_id: str
    scope: Scope
    expires_at: float


@dataclass(frozen=True)
class Person:
    """Someone who has signed in and whose access nobody has revoked."""

    id: str
    name: str
    added_at: float
    """The first sign-in that opened something, in seconds since 1970."""
    signed_in_at: float
    """The last sign-in."""
    scopes: Mapping[str, Scope]
    """Project → scope, by the last sign-in."""


class PeopleStore(StorePart):
    """Sign-ins of people, and the projects that they may work in."""

    key_days = PERSON_DAYS
    """Days after a person's last sign-in for which keys that they made work (FT_OIDC_KEY_DAYS)."""

    def is_done(self, state: str) -> bool:
        """Return whether a sign-in was carried out already."""
        query = select(sessions.c.digest).where(
            sessions.c.digest == digest_of(state), sessions.c.kind == "state"
        )
        with self._database.reading() as connection:
            return connection.scalars(query).one_or_none() is not None

    def sign_in(self, person: SignOn, seconds: float) -> str | None:
        """Let a person work in the projects of the grants, and in no other, for `seconds`.

        Return the secret of a browser's session in the one where the person was last, at first the
        first one; None if none of them exists. Raises AuthError if the sign-in was carried out
        before.
        """
        secret = SIGN_ON_MARK + secrets.token_urlsafe(SECRET_BYTES)
        return secret if self._carry_out(person, seconds, "session", secret, None) else None

    def log_in(self, person: SignOn, seconds: float, project_id: str | None) -> Login | None:
        """Do as `sign_in`, for the command line, in one project; None: where the person was last.

        Raises AuthError as `sign_in`, ForbiddenError if the grants do not open that project.
        """
        secret = LOGIN_MARK + secrets.token_urlsafe(SECRET_BYTES)
        place = self._carry_out(person, seconds, "login", secret, project_id)
        if place is None:
            return None
        return Login(secret, place.project_id, place.scope, place.now + seconds)

    def _carry_out(
        self, person: SignOn, seconds: float, kind: Kind, secret: str, project_id: str | None
    ) -> Any:
        """Carry out a sign-in, and return the person's row of the project that it leads to."""
        with self._database.writing() as connection:
            living = select(projects.c.id).where(
                projects.c.id.in_(list(person.grants)), projects.c.archived_at.is_(None)
            )
            existing = set(connection.scalars(living))
            opened = [project_id for project_id in person.grants if project_id in existing]
            _withdraw(connection, person.identity, opened)
            rows = [_let_in(connection, person, project_id, seconds) for project_id in opened]
            for row in rows:
                _keep_keys(connection, row, self.key_days)
            if not rows:
                return None
            last = max(
                rows, key=lambda row: (row.project_id == project_id, row.last_used_at or 0.0)
            )
            place = (last.project_id, last.id)
            try:
                add_session(
                    connection, "state", person.state, *place, database_time() + STATE_SECONDS
                )
            except IntegrityError:
                raise AuthError(
                    "This sign-in was carried out before.", code="sign_in_repeated"
                ) from None
            is_open = project_id in (None, last.project_id)
            if is_open:
                _note_use(connection, last.id)
                add_session(connection, kind, secret, *place, database_time() + seconds)
        if not is_open:  # behind the transaction: groups that are gone have ended what they opened
            raise ForbiddenError(
                f"project: your groups do not open {str(project_id)[:80]!r}, but "
                f"{', '.join(opened[:10])}.",
            )
        return last

    def list_people(
        self, *, organization: str | None = None, project_id: str | None = None
    ) -> list[Person]:
        """Return those who have signed in to projects of an organisation, or to one project, the
        first ones first.
        """
        whose = (
            projects.c.organization == organization
            if project_id is None
            else projects.c.id == project_id
        )
        query = (
            select(keys)
            .join(projects, projects.c.id == keys.c.project_id)
            .where(_LIVING, THERE, whose)
            .order_by(keys.c.created_at, keys.c.id)
        )
        found: dict[str, list[RowMapping]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(query).mappings():
                found.setdefault(row["identity"], []).append(row)
        return [_person(identity, rows) for identity, rows in found.items()]

    def end(self, person: str) -> list[ApiKey]:
        """End what a person has here at once: sessions, and the keys that they made. Return the
        keys that were revoked, the person's own among them.

        `person`: the name, the identity, the id of the person or of a key that stands for them.
        Raises NotFoundError, or SpecError if several people have that name.
        """
        rows_of_people = (
            select(keys.c.identity, keys.c.name, keys.c.id)
            .where(keys.c.identity.is_not(None))
            .order_by(keys.c.identity)
        )
        with self._database.writing() as connection:
            found = list(
                dict.fromkeys(
                    row.identity
                    for row in connection.execute(rows_of_people)
                    if person in (row.name, row.identity, row.id, _person_id(row.identity))
                )
            )
            if not found:
                raise NotFoundError(
                    f"Nobody called {person[:80]!r} has signed in here.", param="person"
                )
            if len(found) > 1:
                raise SpecError(
                    f"{len(found)} people are called {person!r}: give one's issuer and subject: "
                    f"{', '.join(map(repr, found))}.",
                    param="person",
                )
            mine = and_(keys.c.identity == found[0], keys.c.revoked_at.is_(None))
            ended = update(keys).where(mine).values(revoked_at=database_time()).returning(*KEY)
            rows = [ApiKey(**row) for row in connection.execute(ended).mappings().all()]
            for row in rows:
                record(connection, row.project_id, "key.revoked", row.id)
            all_rows = select(keys.c.id).where(keys.c.identity == found[0])
            return rows + revoke_with(connection, keys.c.ends_with.in_(all_rows))

    def projects_of(self, identity: str) -> dict[str, str]:
        """Return the projects that a person may work in now: id → name."""
        query = (
            select(projects.c.id, projects.c.name)
            .join(keys, keys.c.project_id == projects.c.id)
            .where(_may_work(identity))
        )
        with self._database.reading() as connection:
            return {
                row.id: row.name or row.id
                for row in connection.execute(query.order_by(projects.c.created_at))
            }

    def change_project(self, secret: str, identity: str, project_id: str) -> bool:
        """Move a person's session to another project of theirs; False, and nothing is changed, if
        they may not work there.
        """
        query = select(keys.c.id).join(projects, projects.c.id == keys.c.project_id)
        with self._database.writing() as connection:
            there = connection.scalars(
                query.where(_may_work(identity), projects.c.id == project_id)
            ).one_or_none()
            if there is None:
                return False
            _note_use(connection, there)
            mine = update(sessions).where(
                sessions.c.digest == digest_of(secret), sessions.c.kind == "session"
            )
            return (
                connection.execute(mine.values(project_id=project_id, key_id=there)).rowcount == 1
            )


def _person_id(identity: str) -> str:
    """Return the id by which paths name a person: an issuer is an address."""
    return f"user-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"


def _person(identity: str, rows: Sequence[RowMapping]) -> Person:
    """`rows`: of the person's projects, the oldest first."""
    newest = max(rows, key=lambda row: row["signed_in_at"] or 0.0)
    return Person(
        id=_person_id(identity),
        name=newest["name"],
        added_at=rows[0]["created_at"],
        signed_in_at=newest["signed_in_at"] or 0.0,
        scopes={row["project_id"]: row["scope"] for row in rows},
    )


def _may_work(identity: str) -> Any:
    return and_(
        keys.c.identity == identity,
        keys.c.revoked_at.is_(None),
        keys.c.expires_at > database_time(),
        projects.c.archived_at.is_(None),
    )


def _withdraw(connection: Connection, identity: str, remaining: list[str]) -> None:
    """End all that a person has in other projects, and the keys that they made as one who worked
    there.
    """
    lost = and_(
        keys.c.identity == identity,
        keys.c.project_id.not_in(remaining),
        keys.c.expires_at > database_time(),
    )
    statement = (
        update(keys)
        .where(lost)
        .values(expires_at=database_time())
        .returning(keys.c.project_id, keys.c.id)
    )
    for row in connection.execute(statement).all():
        record(connection, row.project_id, "person.withdrawn", row.id)
    elsewhere = select(keys.c.id).where(
        keys.c.identity == identity, keys.c.project_id.not_in(remaining)
    )
    revoke_with(connection, keys.c.ends_with.in_(elsewhere))


def _keep_keys(connection: Connection, person: Any, days: float) -> None:
    """Let the keys that a person made work on after a sign-in, but for those that the person could
    not make any more.
    """
    mine = keys.c.ends_with == person.id
    if (within := _WITHIN.get(person.scope)) is not None:
        more = or_(keys.c.scope.not_in(within), keys.c.project_id != person.project_id)
        revoke_with(connection, and_(mine, more))
    until = database_time() + days * DAY_SECONDS
    end = case((keys.c.latest_end < until, keys.c.latest_end), else_=until)
    living = update(keys).where(mine, keys.c.revoked_at.is_(None))
    connection.execute(living.values(expires_at=end))


def _note_use(connection: Connection, key_id: str) -> None:
    connection.execute(update(keys).where(keys.c.id == key_id).values(last_used_at=database_time()))


def _let_in(connection: Connection, person: SignOn, project_id: str, seconds: float) -> Any:
    """Return a person's key in a project, which has the scope and time of this sign-in."""
    scope = person.grants[project_id]
    until = {
        "name": person.name,
        "scope": scope,
        "expires_at": database_time() + seconds,
        "signed_in_at": database_time(),
    }
    row = {
        "id": new_id("key_"),
        "project_id": project_id,
        "identity": person.identity,
        "prefix": _PREFIX,
    }
    digest = digest_of(secrets.token_urlsafe(SECRET_BYTES))  # of a secret that nobody has
    statement = (
        upsert(connection, keys)
        .values(**row, **until, digest=digest, created_at=database_time())
        .on_conflict_do_update(
            index_elements=["identity", "project_id"], index_where=LIVING_PERSON, set_=until
        )
        .returning(
            *(keys.c.id, keys.c.project_id, keys.c.scope, keys.c.last_used_at),
            database_time().label("now"),
        )
    )
    key = connection.execute(statement).one()
    record(connection, project_id, "person.signed_in", key.id, name=person.name, scope=scope)
    return key
