"""People who sign in by single sign-on: what their groups open, for how long, and what ends it.

On both databases.
"""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import AuthError, ForbiddenError, NotFoundError, SpecError
from ft_service.store.records import NewKey
from ft_service.store.tables import keys
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


DAY = 86_400.0


def session_of(store: Any, state: str, **grants: Any) -> Any:
    """Who is signed in by a sign-in that is carried out here."""
    return store.sessions.session_holder(store.people.sign_in(ada(state, **grants), 60))


def key_by(store: Any, holder: Any, project: str = PROJECT, **more: Any) -> tuple[Any, str]:
    given: dict[str, Any] = {"name": "laptop", "scope": "submit"} | more
    return store.keys.create_key(NewKey(project_id=project, **given), made_by=holder)


def age(store: Any, days: float) -> None:
    """Let days pass."""
    times = (keys.c.created_at, keys.c.expires_at, keys.c.signed_in_at, keys.c.latest_end)
    with store.writing() as connection:
        connection.execute(keys.update().values({time: time - days * DAY for time in times}))


def test_a_key_that_a_person_makes_works_while_the_person_signs_in(store):
    _, machine = store.keys.create_key(NewKey(project_id=PROJECT, name="ci", scope="admin"))
    holder = session_of(store, "one", **{PROJECT: "admin"})
    key, secret = key_by(store, holder)
    _, short = key_by(store, holder, expires_at=store.now() + 10 * DAY)
    child, childs = key_by(store, store.keys.authenticate(key_by(store, holder, scope="admin")[1]))
    assert key.ends_with == child.ends_with == holder.key_id
    assert key.expires_at == pytest.approx(store.now() + 30 * DAY, abs=60)
    age(store, 29)
    assert store.keys.authenticate(secret).ends_with == holder.key_id
    assert store.keys.authenticate(short) is None
    age(store, 2)
    assert [store.keys.authenticate(each) for each in (secret, childs)] == [None, None]
    session_of(store, "two", **{PROJECT: "admin"})
    assert store.keys.authenticate(secret)
    assert store.keys.authenticate(childs)
    assert store.keys.authenticate(short) is None, "its own end stays"
    age(store, 1000)
    assert store.keys.authenticate(machine)


def test_a_sign_in_without_the_group_revokes_the_keys(store):
    holder = session_of(store, "one", **{PROJECT: "admin", OTHER: "admin"})
    _, secret = key_by(store, holder)
    other = store.people.sign_in(ada("two", **{PROJECT: "admin", OTHER: "admin"}), 60)
    store.people.change_project(other, "https://login.example ada", OTHER)
    _, theirs = key_by(store, store.sessions.session_holder(other), OTHER)
    age(store, 1)  # no session is left
    session_of(store, "three", **{OTHER: "admin"})
    assert store.keys.authenticate(secret) is None
    assert store.keys.authenticate(theirs)
    told = store.audit.list_audit(project_id=PROJECT).data[0]
    assert (told.type, told.detail) == ("key.revoked", {"ended_with": holder.key_id})
    assert store.people.sign_in(ada("four"), 60) is None
    session_of(store, "five", **{PROJECT: "admin", OTHER: "admin"})
    assert [store.keys.authenticate(each) for each in (secret, theirs)] == [None, None]


def test_a_sign_in_with_less_revokes_the_keys_that_may_more(store):
    holder = session_of(store, "one", **{PROJECT: "admin"})
    made = {
        name: key_by(store, holder, project, scope=scope)[1]
        for name, project, scope in (
            ("admin", PROJECT, "admin"),
            ("metrics", PROJECT, "metrics"),
            ("submit", PROJECT, "submit"),
            ("read", PROJECT, "read"),
            ("elsewhere", OTHER, "read"),
        )
    }

    def working() -> set[str]:
        return {name for name, secret in made.items() if store.keys.authenticate(secret)}

    session_of(store, "two", **{PROJECT: "admin"})
    assert working() == set(made)
    session_of(store, "three", **{PROJECT: "submit"})
    assert working() == {"submit", "read"}
    session_of(store, "four", **{PROJECT: "read"})
    assert working() == {"read"}


def test_rotating_keeps_whose_a_key_is(store):
    holder = session_of(store, "one", **{PROJECT: "admin"})
    ends = store.now() + 40 * DAY
    key, old = key_by(store, holder, expires_at=ends)
    new, secret = store.keys.rotate_key(PROJECT, key.id, keep_seconds=60)
    again, _ = store.keys.rotate_key(PROJECT, key.id, keep_seconds=60)
    for each in (new, again):
        assert (each.ends_with, each.latest_end) == (holder.key_id, ends)
        assert each.expires_at == pytest.approx(store.now() + 30 * DAY, abs=60)
    age(store, 1)
    session_of(store, "two", **{PROJECT: "admin"})
    assert store.keys.authenticate(old) is None, "a sign-in does not bring it back"
    store.keys.revoke_key(PROJECT, holder.key_id)
    assert store.keys.authenticate(secret) is None


def test_the_longest_life_holds_for_keys_of_people_too(store):
    holder = session_of(store, "one", **{PROJECT: "admin"})
    key, secret = key_by(store, holder)
    store.keys.max_days = 40.0
    assert store.keys.end_old_keys() == 1
    (kept,) = [each for each in store.keys.list_keys(PROJECT) if each.id == key.id]
    assert kept.expires_at == pytest.approx(key.expires_at)
    age(store, 20)
    session_of(store, "two", **{PROJECT: "admin"})
    age(store, 19)
    assert store.keys.authenticate(secret)
    age(store, 2)
    assert store.keys.authenticate(secret) is None


def test_all_that_a_person_has_can_be_ended_at_once(store):
    secret = store.people.sign_in(ada("one", **{PROJECT: "admin", OTHER: "read"}), 60)
    holder = store.sessions.session_holder(secret)
    _, made = key_by(store, holder)
    _, machine = store.keys.create_key(
        NewKey(project_id=PROJECT, name="ada@example.com", scope="read")
    )
    assert len(store.people.end("ada@example.com")) == 3
    assert store.people.end("https://login.example ada") == []
    assert store.sessions.session_holder(secret) is None
    assert store.keys.authenticate(made) is None
    assert store.keys.authenticate(machine)
    with pytest.raises(AuthError, match="access has ended"):
        key_by(store, holder)
    with pytest.raises(NotFoundError, match="Nobody called 'bob'"):
        store.people.end("bob")
    namesake = {"identity": "https://other.example ada", "name": "ada@example.com"}
    store.people.sign_in(SignOn(**namesake, grants={PROJECT: "read"}, state="two"), 60)
    with pytest.raises(SpecError, match=r"2 people are called 'ada@example\.com'"):
        store.people.end("ada@example.com")


def test_a_login_is_the_persons_and_ends_with_the_persons_access(store):
    grants = {PROJECT: "admin", OTHER: "read"}
    login = store.people.log_in(ada("one", **grants), 60, None)
    there = store.people.log_in(ada("two", **grants), 60, OTHER)
    assert (login.project_id, there.project_id, there.scope) == (PROJECT, OTHER, "read")
    holder = store.keys.authenticate(login.secret)
    assert (holder.scope, holder.identity) == ("admin", "https://login.example ada")
    assert store.sessions.session_holder(login.secret) is None, "no browser's"
    assert key_by(store, holder)[0].ends_with == holder.key_id
    with pytest.raises(AuthError, match="carried out before"):
        store.people.log_in(ada("two", **grants), 60, None)
    with pytest.raises(ForbiddenError, match="do not open 'nowhere', but"):
        store.people.log_in(ada("three", **grants), 60, "nowhere")
    store.sessions.end_session(there.secret)
    assert store.keys.authenticate(there.secret) is None
    assert store.keys.authenticate(login.secret)
    with pytest.raises(ForbiddenError):
        store.people.log_in(ada("four", **{OTHER: "read"}), 60, PROJECT)
    assert store.keys.authenticate(login.secret) is None, "its group was found gone"
    again = store.people.log_in(ada("five", **grants), 60, None)
    assert store.people.log_in(ada("six"), 60, None) is None
    assert store.keys.authenticate(again.secret) is None
