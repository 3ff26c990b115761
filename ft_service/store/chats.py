"""Chats and responses that their callers asked to keep, of projects: with a lifetime, in limited
room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from ft_service.store.database import StorePart, database_time, is_over
from ft_service.store.records import Page
from ft_service.store.rows import Listing, columns_of, not_found
from ft_service.store.tables import chat_metadata, stored_chats
from ft_service.store.tenants.projects import lock_project

AT_ONCE = 500
"""Rows that a transaction removes at most."""
PAGE_BYTES = 16 * 1024**2
"""A page of a list ends before it has more bytes, but for its first chat."""
LONGEST_SECONDS = 3650 * 86_400.0
"""Longest lifetime."""
ChatKind = Literal["chat", "response"]
"""Which of OpenAI's two calls made it. Both have the same room, and each finds its own alone."""
_NOUNS: Mapping[ChatKind, str] = {
    "chat": "stored chat completion",
    "response": "stored response",
}
_VISIBLE = ~is_over(stored_chats.c.expires_at, LONGEST_SECONDS)


@dataclass(frozen=True, kw_only=True)
class StoredChat:
    """A chat completion, or a response, with what asked for it. Times are seconds since the epoch
    on the database's clock.
    """

    id: str
    project_id: str
    model: str
    """As its request named it."""
    messages: list[dict[str, Any]]
    """Those of the request, as they came; of a response, the input items of its whole
    conversation.
    """
    tools: list[dict[str, Any]] | None
    answer: dict[str, Any]
    """The chat completion, or the response."""
    pairs: dict[str, str] | None
    """Metadata; None: it has none."""
    bytes: int
    """Of messages, tools and answer, as JSON."""
    kind: ChatKind = "chat"
    label: bool | None = None
    """Whether the answer is a good one; None: nobody said."""
    choice: int = 0
    """The answer that label and `better` are about, of several."""
    better: dict[str, Any] | None = None
    """A better answer, as a message of the assistant."""
    created_at: float = 0.0
    expires_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ChatFilter:
    """Which chats a list has. None, or no pairs: any."""

    model: str | None = None
    since: float | None = None
    """Created at this time or later."""
    label: bool | None = None
    pairs: Mapping[str, str] | Literal["none"] | None = None
    """Metadata that they have, among others; "none": only chats without metadata."""


_CHAT = columns_of(StoredChat, stored_chats)


class ChatStore(StorePart):
    """Chats that are kept. Those of `kind` response are found by their id, and not listed."""

    def add_chat(self, chat: StoredChat, *, seconds: float, room: int) -> int:
        """Keep a chat for some time. Chats of its project that leave it no place in `room` bytes
        are removed, the oldest first. Returns how many.

        Raises NotFoundError if the project was deleted.
        """
        given = {column.name: getattr(chat, column.name) for column in _CHAT}
        now = database_time()
        with self._database.writing() as connection:
            lock_project(connection, chat.project_id)
            removed = _make_room(connection, chat.project_id, room - chat.bytes)
            row = {**given, "created_at": now, "expires_at": now + seconds}
            added = insert(stored_chats).values(row).returning(stored_chats.c.position)
            position = connection.scalars(added).one()
            _add_pairs(connection, chat.project_id, position, chat.pairs or {})
        return removed

    def get_chat(self, project_id: str, chat_id: str, kind: ChatKind = "chat") -> StoredChat:
        with self._database.reading() as connection:
            query = select(*_CHAT).where(_mine(project_id, chat_id, kind))
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise not_found(_NOUNS[kind], chat_id)
        return StoredChat(**row)

    def list_chats(
        self,
        project_id: str,
        which: ChatFilter | None = None,
        *,
        after: str | None = None,
        limit: int = 20,
        newest_first: bool = False,
    ) -> Page[StoredChat]:
        """A project's chats, the oldest first; fewer than `limit` if they would have more than
        PAGE_BYTES.
        """
        mine = (stored_chats.c.project_id == project_id, stored_chats.c.kind == "chat", _VISIBLE)
        sized = select(stored_chats.c.position, stored_chats.c.bytes)
        query: Any = sized.where(*mine)
        for condition in _conditions(which or ChatFilter()):
            query = query.where(condition)
        listing = Listing(
            stored_chats.c.position, stored_chats.c.id, mine, newest_first=newest_first
        )
        with self._database.reading() as connection:
            sizes = connection.execute(
                listing.apply(connection, query, after).limit(limit + 1)
            ).all()
            shown = _fitting([row.bytes for row in sizes[:limit]])
            places = [row.position for row in sizes[:shown]]
            found = select(*_CHAT).where(stored_chats.c.position.in_(places))
            rows = connection.execute(listing.apply(connection, found, None)).mappings().all()
        return Page(data=[StoredChat(**row) for row in rows], has_more=len(sizes) > shown)

    def change_chat(self, project_id: str, chat_id: str, changes: Mapping[str, Any]) -> StoredChat:
        """Change label, choice, better answer or pairs of a chat."""
        with self._database.writing(makes_room=True) as connection:
            changed = (
                update(stored_chats)
                .where(_mine(project_id, chat_id, "chat"))
                .values(changes)
                .returning(stored_chats.c.position, *_CHAT)
            )
            row = connection.execute(changed).mappings().one_or_none()
            if row is None:
                raise not_found(_NOUNS["chat"], chat_id)
            if "pairs" in changes:
                _remove_pairs(connection, [row["position"]])
                _add_pairs(connection, project_id, row["position"], changes["pairs"] or {})
        return StoredChat(**{column.name: row[column.name] for column in _CHAT})

    def delete_chat(self, project_id: str, chat_id: str, kind: ChatKind = "chat") -> None:
        with self._database.writing(makes_room=True) as connection:
            query = select(stored_chats.c.position).where(_mine(project_id, chat_id, kind))
            places = list(connection.scalars(query))
            if not places:
                raise not_found(_NOUNS[kind], chat_id)
            _remove(connection, places)

    def forget_chats(self) -> bool:
        """Remove some of the chats whose lifetime is over. False: there are none."""
        over = select(stored_chats.c.position).where(~_VISIBLE).limit(AT_ONCE)
        with self._database.reading() as connection:
            places = list(connection.scalars(over))
        if places:
            with self._database.writing(makes_room=True) as connection:
                _remove(connection, places)
        return bool(places)


def _mine(project_id: str, chat_id: str, kind: ChatKind) -> Any:
    of_project = and_(stored_chats.c.project_id == project_id, stored_chats.c.kind == kind)
    return and_(of_project, stored_chats.c.id == chat_id, _VISIBLE)


def _conditions(which: ChatFilter) -> list[Any]:
    conditions: list[Any] = []
    if which.model is not None:
        conditions.append(stored_chats.c.model == which.model)
    if which.since is not None:
        conditions.append(stored_chats.c.created_at >= which.since)
    if which.label is not None:
        conditions.append(stored_chats.c.label.is_(which.label))
    if which.pairs == "none":
        return [*conditions, stored_chats.c.pairs.is_(None)]
    for key, value in (which.pairs or {}).items():
        pair = chat_metadata.alias()
        own = select(pair.c.chat_position).where(
            pair.c.project_id == stored_chats.c.project_id, pair.c.key == key, pair.c.value == value
        )
        conditions.append(stored_chats.c.position.in_(own))
    return conditions


def _fitting(sizes: list[int]) -> int:
    """How many chats a page has: as many as PAGE_BYTES hold, and one at least."""
    held = 0
    for number, size in enumerate(sizes):
        held += size
        if number and held > PAGE_BYTES:
            return number
    return len(sizes)


def _make_room(connection: Connection, project_id: str, room: int) -> int:
    """Remove the oldest chats of a project, whose row is locked, until the others have at most
    `room` bytes. Returns how many.
    """
    mine = stored_chats.c.project_id == project_id
    held = select(func.coalesce(func.sum(stored_chats.c.bytes), 0)).where(mine)
    excess = int(connection.scalars(held).one()) - room
    oldest = select(stored_chats.c.position, stored_chats.c.bytes).where(mine)
    oldest = oldest.order_by(stored_chats.c.position).limit(AT_ONCE)
    removed = 0
    while excess > 0 and (rows := connection.execute(oldest).all()):
        places: list[int] = []
        for row in rows:
            if excess <= 0:
                break
            places.append(row.position)
            excess -= row.bytes
        _remove(connection, places)
        removed += len(places)
    return removed


def _remove(connection: Connection, places: list[int]) -> None:
    _remove_pairs(connection, places)
    connection.execute(delete(stored_chats).where(stored_chats.c.position.in_(places)))


def _remove_pairs(connection: Connection, places: list[int]) -> None:
    connection.execute(delete(chat_metadata).where(chat_metadata.c.chat_position.in_(places)))


def _add_pairs(
    connection: Connection, project_id: str, position: int, pairs: Mapping[str, str]
) -> None:
    mine = {"chat_position": position, "project_id": project_id}
    rows = [{**mine, "key": key, "value": value} for key, value in pairs.items()]
    if rows:
        connection.execute(insert(chat_metadata), rows)
