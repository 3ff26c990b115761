"""Kept chats: of one project, for a time, in limited room, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select, update

from ft_service.errors import NotFoundError, SpecError
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


def test_lists_have_what_was_asked_for_of_the_project_alone(store: Store) -> None:
    add(store, "a", pairs={"k": "v", "u": "1"})
    add(store, "b", pairs={"k": "w"}, model="n")
    add(store, "c", label=True)
    add(store, "other", project_id=OTHER, pairs={"k": "v"})
    assert names(store) == ["a", "b", "c"]
    assert names(store, newest_first=True, limit=2) == ["c", "b"]
    assert names(store, after="a", limit=1) == ["b"]
    assert store.chats.list_chats(PROJECT, limit=2).has_more
    assert not store.chats.list_chats(PROJECT, limit=3).has_more
    assert names(store, ChatFilter(pairs={"k": "v"})) == ["a"]
    assert names(store, ChatFilter(pairs={"k": "v", "u": "2"})) == []
    assert names(store, ChatFilter(pairs="none")) == ["c"]
    assert names(store, ChatFilter(model="n")) == ["b"]
    assert names(store, ChatFilter(label=True)) == ["c"]
    assert names(store, ChatFilter(label=False)) == []
    created = store.chats.get_chat(PROJECT, "b").created_at
    assert names(store, ChatFilter(since=created)) == ["b", "c"]
    with pytest.raises(SpecError):
        names(store, after="other")
    for act in (
        lambda: store.chats.get_chat(PROJECT, "other"),
        lambda: store.chats.change_chat(PROJECT, "other", {"label": False}),
        lambda: store.chats.delete_chat(PROJECT, "other"),
    ):
        with pytest.raises(NotFoundError):
            act()
    assert store.chats.get_chat(OTHER, "other").label is None


def test_what_is_said_of_a_chat_replaces_what_was_said_before(store: Store) -> None:
    add(store, "a", pairs={"k": "v"})
    better = {"role": "assistant", "content": "Better."}
    changed = store.chats.change_chat(PROJECT, "a", {"label": False, "better": better})
    assert (changed.label, changed.better, changed.pairs) == (False, better, {"k": "v"})
    store.chats.change_chat(PROJECT, "a", {"better": None, "pairs": {"u": "1"}})
    found = store.chats.get_chat(PROJECT, "a")
    assert (found.label, found.better, found.pairs) == (False, None, {"u": "1"})
    assert names(store, ChatFilter(pairs={"k": "v"})) == []
    assert names(store, ChatFilter(pairs={"u": "1"})) == ["a"]
    store.chats.delete_chat(PROJECT, "a")
    assert (rows(store, stored_chats), rows(store, chat_metadata)) == (0, 0)


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
