"""Kept chats: of one project, for a time, in limited room, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select, update

from ft_service.errors import NotFoundError
from ft_service.store import chats as chats_module
from ft_service.store.chats import ChatFilter
from ft_service.store.sql import Store
from ft_service.store.tables import chat_metadata, stored_chats
from tests.support.records import OTHER, PROJECT, new_chat

ROOM = 10_000


def add(store: Store, name: str, *, room: int = ROOM, size: int = 100, **values: Any) -> int:
    chat = new_chat(id=name, bytes=size, **values)
    return store.chats.add_chat(chat, seconds=60, room=room)


def names(store: Store, which: ChatFilter | None = None, **options: Any) -> list[str]:
    return [chat.id for chat in store.chats.list_chats(PROJECT, which, **options).data]


def rows(store: Store, table: Any) -> int:
    with store.reading() as connection:
        return connection.scalars(select(func.count()).select_from(table)).one()


def end(store: Store, name: str) -> None:
    with store.writing() as connection:
        over = update(stored_chats).where(stored_chats.c.id == name).values(expires_at=1.0)
        connection.execute(over)


def test_the_oldest_make_room_for_the_newest_of_their_project(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats_module, "AT_ONCE", 2)
    add(store, "other", project_id=OTHER, size=400)
    for number in range(4):
        assert add(store, str(number), room=400, pairs={"k": "v"}) == 0
    assert add(store, "large", room=400, size=250) == 3
    assert names(store) == ["3", "large"]
    assert rows(store, chat_metadata) == 1
    assert store.chats.get_chat(OTHER, "other").bytes == 400


def test_a_page_ends_before_it_has_too_many_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats_module, "PAGE_BYTES", 250)
    for name, size in (("a", 300), ("b", 100), ("c", 100), ("d", 100)):
        add(store, name, size=size)
    page = store.chats.list_chats(PROJECT)
    assert ([chat.id for chat in page.data], page.has_more) == (["a"], True)
    assert names(store, after="a") == ["b", "c"]


def test_a_chat_whose_lifetime_is_over_is_gone_at_once_and_then_removed(store: Store) -> None:
    for name in ("old", "new"):
        add(store, name, pairs={"k": "v"})
    end(store, "old")
    assert names(store) == ["new"]
    with pytest.raises(NotFoundError):
        store.chats.get_chat(PROJECT, "old")
    assert store.chats.forget_chats()
    assert not store.chats.forget_chats()
    assert (rows(store, stored_chats), rows(store, chat_metadata)) == (1, 1)
