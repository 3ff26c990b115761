"""People who sign in by single sign-on: what their groups open, for how long, and what ends it.

On both databases.
"""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import AuthError, SpecError
from ft_service.store.tenants.people import SignOn
from tests.support.records import OTHER, PROJECT


def ada(state: str, **grants: Any) -> SignOn:
    return SignOn(
        identity="https://login.example ada", name="ada@example.com", grants=grants, state=state
    )


def test_a_person_has_one_key_in_each_project_that_nothing_but_a_session_opens(store):
    first = store.people.sign_in(ada("one", **{PROJECT: "submit", "proj_none": "admin"}), 60)
    second = store.people.sign_in(ada("two", **{PROJECT: "read"}), 60)
    (key,) = store.keys.list_keys(PROJECT)
    assert (key.name, key.scope) == ("ada@example.com", "read")
    holders = [store.sessions.session_holder(secret) for secret in (first, second)]
    assert [(holder.key_id, holder.scope) for holder in holders] == [(key.id, "read")] * 2
    assert store.keys.authenticate(first) is None
    with pytest.raises(SpecError, match="no secret to replace"):
        store.keys.rotate_key(PROJECT, key.id, keep_seconds=0)


def test_a_sign_in_is_carried_out_once(store):
    store.people.sign_in(ada("one", **{PROJECT: "read"}), 60)
    assert store.people.is_done("one")
    assert not store.people.is_done("two")
    with pytest.raises(AuthError, match="carried out before"):
        store.people.sign_in(ada("one", **{PROJECT: "admin"}), 60)
    assert store.keys.list_keys(PROJECT)[0].scope == "read", "nothing of the second one is left"
    assert store.sessions.session_holder("one") is None


def test_without_a_group_all_is_over(store):
    secret = store.people.sign_in(ada("one", **{PROJECT: "read", OTHER: "read"}), 60)
    assert store.people.projects_of("https://login.example ada") == {PROJECT: PROJECT, OTHER: OTHER}
    store.people.sign_in(ada("two", **{OTHER: "read"}), 60)
    assert store.sessions.session_holder(secret) is None
    assert not store.people.change_project(secret, "https://login.example ada", PROJECT)
    assert store.people.projects_of("https://login.example ada") == {OTHER: OTHER}
    assert store.people.sign_in(ada("three"), 60) is None
    assert store.people.projects_of("https://login.example ada") == {}


def test_a_person_moves_between_their_projects_and_comes_back_to_the_last(store):
    secret = store.people.sign_in(ada("one", **{PROJECT: "read", OTHER: "admin"}), 60)
    assert not store.people.change_project(secret, "https://login.example ada", "default-of-others")
    assert not store.people.change_project(secret, "https://login.example eve", OTHER)
    assert store.people.change_project(secret, "https://login.example ada", OTHER)
    assert store.sessions.session_holder(secret).scope == "admin"
    again = store.people.sign_in(ada("two", **{PROJECT: "read", OTHER: "admin"}), 60)
    assert store.sessions.session_holder(again).project_id == OTHER


def test_revoking_a_persons_key_ends_the_sessions_and_an_archived_project_is_closed(store):
    secret = store.people.sign_in(ada("one", **{PROJECT: "read"}), 60)
    (key,) = store.keys.list_keys(PROJECT)
    store.keys.revoke_key(PROJECT, key.id)
    assert store.sessions.session_holder(secret) is None
    again = store.people.sign_in(ada("two", **{PROJECT: "read"}), 60)
    assert store.sessions.session_holder(again) is not None, "the groups decide who may come in"
    store.projects.archive_project(PROJECT)
    assert store.people.sign_in(ada("three", **{PROJECT: "read"}), 60) is None
