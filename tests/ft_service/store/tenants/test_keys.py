from __future__ import annotations

import hashlib

import pytest
from sqlalchemy import create_engine, select, update

from ft_service.errors import ConflictError, NotFoundError, SpecError
from ft_service.store.records import NewKey, Principal
from ft_service.store.tables import keys
from ft_service.store.tenants.keys import LAST_USED_SECONDS
from tests.support.attempts import wait_for
from tests.support.records import OTHER, PROJECT


def test_a_secret_opens_its_project(store):
    key, secret = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))

    assert secret.startswith("ft-")
    assert secret.startswith(key.prefix)
    assert len(secret) >= 3 + 256 / 6
    assert store.keys.authenticate(secret) == Principal(
        key_id=key.id, project_id=PROJECT, organization="acme", scope="user"
    )


@pytest.mark.parametrize(
    "wrong", ["", "ft-", "ft-unknown", "ft-\x00", "ft-\ud800", "ft-' OR 1=1 --"]
)
def test_another_secret_opens_nothing(store, wrong):
    store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    assert store.keys.authenticate(wrong) is None


@pytest.mark.parametrize("ahead", [None, 1e6])
def test_a_key_that_is_rotated_again_has_a_successor_of_the_same_life(store, ahead):
    """The answer to the first rotation may have been lost, with the secret in it."""
    ends = None if ahead is None else store.now() + ahead
    key, old_secret = store.keys.create_key(
        NewKey(project_id=PROJECT, name="mine", scope="user", expires_at=ends)
    )
    first, _ = store.keys.rotate_key(PROJECT, key.id, keep_seconds=60)
    second, _ = store.keys.rotate_key(PROJECT, key.id, keep_seconds=60)
    store.keys.rotate_key(PROJECT, first.id, keep_seconds=60)
    third, secret = store.keys.rotate_key(PROJECT, key.id, keep_seconds=0)
    assert {first.expires_at, second.expires_at, third.expires_at} == {ends}
    assert store.keys.authenticate(secret)
    assert store.keys.authenticate(old_secret) is None


def test_only_a_digest_is_kept(store, store_url):
    _, secret = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="admin"))
    engine = create_engine(store_url)
    with engine.connect() as connection:
        row = connection.execute(select(keys)).one()
    engine.dispose()
    assert row.digest == hashlib.sha256(secret.encode()).hexdigest()
    assert not any(isinstance(value, str) and secret in value for value in row)


def test_a_given_secret_works_once(store):
    key, secret = store.keys.create_key(
        NewKey(project_id=PROJECT, name="first", scope="admin", secret="ft-chosen-by-the-operator")
    )
    assert secret == "ft-chosen-by-the-operator"
    assert store.keys.authenticate(secret).key_id == key.id
    with pytest.raises(ConflictError):
        store.keys.create_key(
            NewKey(project_id=PROJECT, name="second", scope="admin", secret=secret)
        )
    with pytest.raises(SpecError, match=r"5 characters.*at least 20"):
        store.keys.create_key(
            NewKey(project_id=PROJECT, name="short", scope="admin", secret="ft-12")
        )


def test_a_given_secret_is_in_no_log():
    new = NewKey(project_id=PROJECT, name="first", scope="admin", secret="ft-chosen-by-somebody")
    assert "chosen" not in repr(new)


def test_an_expired_key_opens_nothing(store):
    _, gone = store.keys.create_key(
        NewKey(project_id=PROJECT, name="gone", scope="user", expires_at=store.now() - 1)
    )
    _, valid = store.keys.create_key(
        NewKey(project_id=PROJECT, name="valid", scope="user", expires_at=store.now() + 1000)
    )
    assert store.keys.authenticate(gone) is None
    assert store.keys.authenticate(valid) is not None


def test_a_revoked_key_opens_nothing(store):
    key, secret = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    with pytest.raises(NotFoundError):
        store.keys.revoke_key(OTHER, key.id)
    assert store.keys.authenticate(secret) is not None

    revoked = store.keys.revoke_key(PROJECT, key.id)

    assert revoked.revoked_at is not None
    assert store.keys.authenticate(secret) is None
    assert store.keys.revoke_key(PROJECT, key.id).revoked_at == revoked.revoked_at


def test_last_used_is_written_at_most_once_a_minute(store, store_url):
    _, secret = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    assert store.keys.list_keys(PROJECT)[0].last_used_at is None
    store.keys.authenticate(secret)
    first = wait_for(lambda: store.keys.list_keys(PROJECT)[0].last_used_at, 60)
    store.keys.authenticate(secret)
    store.keys._used_keys.finish()
    assert store.keys.list_keys(PROJECT)[0].last_used_at == first

    engine = create_engine(store_url)
    with engine.begin() as connection:
        connection.execute(update(keys).values(last_used_at=first - LAST_USED_SECONDS - 1))
    engine.dispose()
    store.keys.authenticate(secret)
    store.keys._used_keys.finish()
    assert store.keys.list_keys(PROJECT)[0].last_used_at >= first


def test_keys_are_listed_by_project(store):
    assert not store.keys.has_keys()
    mine = [
        store.keys.create_key(NewKey(project_id=PROJECT, name=name, scope="user"))[0]
        for name in ("a", "b")
    ]
    theirs, _ = store.keys.create_key(NewKey(project_id=OTHER, name="c", scope="admin"))
    assert store.keys.has_keys()
    assert {key.id for key in store.keys.list_keys(PROJECT)} == {key.id for key in mine}
    assert store.keys.list_keys(OTHER) == [theirs]


def test_a_key_needs_a_project(store):
    with pytest.raises(NotFoundError, match="proj_nowhere"):
        store.keys.create_key(NewKey(project_id="proj_nowhere", name="mine", scope="user"))


def test_a_project_takes_the_organizations_new_name(store):
    _, secret = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    store.projects.ensure_project(PROJECT, "ignored")  # it exists
    store.projects.name_organization(PROJECT, "renamed")
    assert store.keys.authenticate(secret).organization == "renamed"


DAY = 86_400.0


def test_no_key_lives_longer_than_the_operator_allows(store):
    long, long_secret = store.keys.create_key(NewKey(project_id=PROJECT, name="old", scope="user"))
    short, _ = store.keys.create_key(
        NewKey(project_id=PROJECT, name="short", scope="user", expires_at=store.now() + DAY)
    )
    scraper, _ = store.keys.create_key(NewKey(project_id=PROJECT, name="scraper", scope="metrics"))
    assert store.keys.end_old_keys() == 0, "no limit is set"
    store.keys.max_days = 30.0
    made, _ = store.keys.create_key(NewKey(project_id=PROJECT, name="new", scope="user"))
    assert made.expires_at == pytest.approx(made.created_at + 30 * DAY, abs=1.0)
    with pytest.raises(
        SpecError, match=r"would live 31 days, .* allows 30 \(FT_MAX_KEY_DAYS\)"
    ) as no:
        store.keys.create_key(
            NewKey(project_id=PROJECT, name="x", scope="user", expires_at=store.now() + 31 * DAY),
            param="p",
        )
    assert no.value.param == "p"

    assert store.keys.end_old_keys() == 1
    assert store.keys.end_old_keys() == 0, "it has its end"
    ends = {key.id: key.expires_at for key in store.keys.list_keys(PROJECT)}
    assert ends[long.id] == pytest.approx(long.created_at + 30 * DAY)
    assert (ends[short.id], ends[scraper.id]) == (short.expires_at, None)
    entry = store.audit.list_audit(project_id=PROJECT).data[0]
    assert (entry.type, entry.target, entry.detail) == ("key.end_set", long.id, {"max_days": 30.0})
    with store.writing() as connection:
        connection.execute(keys.update().values(created_at=keys.c.created_at - 40 * DAY))
    store.keys.max_days = 20.0
    store.keys.end_old_keys()
    assert store.keys.authenticate(long_secret) is None


def test_a_key_with_the_longest_life_begins_a_new_one_when_it_is_rotated(store):
    store.keys.max_days = 30.0
    key, _ = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    short, _ = store.keys.create_key(
        NewKey(project_id=PROJECT, name="short", scope="user", expires_at=store.now() + DAY)
    )
    with store.writing() as connection:
        aged = {
            "created_at": keys.c.created_at - 10 * DAY,
            "expires_at": keys.c.expires_at - 10 * DAY,
        }
        connection.execute(keys.update().where(keys.c.id == key.id).values(aged))
    renewed, _ = store.keys.rotate_key(PROJECT, key.id, keep_seconds=60)
    assert renewed.expires_at == pytest.approx(renewed.created_at + 30 * DAY, abs=1.0)
    again, _ = store.keys.rotate_key(PROJECT, short.id, keep_seconds=60)
    assert again.expires_at == short.expires_at, "what was asked for stays"


def test_only_a_key_that_nobody_has_used_gets_another_secret(store):
    """Nobody has seen the first one; one that was used, or revoked, keeps its own."""
    key, first = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    assert store.keys.replace_secret(OTHER, key.id) is None
    replaced = store.keys.replace_secret(PROJECT, key.id)
    assert replaced is not None
    again, second = replaced
    assert (again.id, again.name, second.startswith(again.prefix)) == (key.id, "mine", True)
    assert store.keys.authenticate(first) is None
    assert store.keys.authenticate(second).key_id == key.id
    store.keys.close()
    assert store.keys.replace_secret(PROJECT, key.id) is None
    assert store.keys.authenticate(second).key_id == key.id
    revoked, _ = store.keys.create_key(NewKey(project_id=PROJECT, name="gone", scope="user"))
    store.keys.revoke_key(PROJECT, revoked.id)
    assert store.keys.replace_secret(PROJECT, revoked.id) is None
    told = [
        one.target
        for one in store.audit.list_audit(project_id=PROJECT).data
        if one.type == "key.secret_replaced"
    ]
    assert told == [key.id]
