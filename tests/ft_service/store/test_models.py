from __future__ import annotations

import pytest

from ft_service.errors import NotFoundError, SpecError
from tests.support.records import OTHER, PROJECT, move_project


@pytest.fixture
def store(store):
    """Both projects are of one organization, as those must be that share something."""
    move_project(store, OTHER, store.projects.get_project(PROJECT).organization)
    return store


def test_a_grant_is_one_row_per_project_in_the_order_asked(store):
    first = store.models.grant(PROJECT, "ft:a", [OTHER])
    both = store.models.grant(PROJECT, "ft:a", [PROJECT, OTHER, PROJECT])

    assert [item.grantee for item in both] == [PROJECT, OTHER]
    assert both[1] == first[0]
    assert store.models.list_permissions(PROJECT, "ft:a").data == both
    assert store.models.list_permissions(PROJECT, "ft:a", order="asc").data == both[::-1]
    assert (
        store.models.list_permissions(PROJECT, "ft:a", order="asc", after=first[0].id).data
        == both[:1]
    )
    assert store.models.list_permissions(PROJECT, "ft:a", grantee=OTHER).data == first
    assert (
        store.models.list_permissions(PROJECT, "ft:b").data
        == store.models.list_permissions(OTHER, "ft:a").data
        == []
    )
    assert store.models.granted(OTHER) == store.models.granted(OTHER, "ft:a") == first
    assert store.models.granted(OTHER, "ft:b") == []

    with pytest.raises(NotFoundError):
        store.models.revoke(OTHER, "ft:a", first[0].id)
    store.models.revoke(PROJECT, "ft:a", first[0].id)
    assert store.models.granted(OTHER) == []


def test_a_grant_to_a_project_that_there_is_not_grants_nothing(store):
    with pytest.raises(SpecError, match=r"project_ids\.1"):
        store.models.grant(PROJECT, "ft:a", [OTHER, "none"])
    assert store.models.granted(OTHER) == []


def test_another_organization_is_granted_nothing_and_what_it_was_granted_is_nothing(store):
    store.models.grant(PROJECT, "ft:a", [OTHER])
    move_project(store, OTHER, "elsewhere")
    assert store.models.granted(OTHER) == store.models.granted(OTHER, "ft:a") == []
    for grantee in (OTHER, "none"):
        with pytest.raises(
            SpecError,
            match=f"project_ids.0 = '{grantee}': there is no such project in this organization",
        ):
            store.models.grant(PROJECT, "ft:a", [grantee])
