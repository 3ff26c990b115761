"""Projects: who they belong to, what they may, what they keep, and lists of them."""

from __future__ import annotations

import pytest

from ft_service.errors import ConflictError, LimitError, NotFoundError, SpecError
from ft_service.store.records import Project, TenantLimits
from ft_service.store.sql import Store
from ft_service.store.tenants.projects import MANAGING_PROJECT, PREFIX, limits_of
from tests.support.databases import set_clock
from tests.support.records import OTHER, PROJECT, new_file


def listed(store: Store, **options: object) -> list[str]:
    return [one.id for one in store.projects.list_projects(**options).data]  # type: ignore[arg-type]


def deeds(store: Store, project_id: str) -> list[tuple[str, object]]:
    return [(one.type, one.detail) for one in store.audit.list_audit(project_id=project_id).data]


def test_a_project_is_what_was_asked_for_and_is_not_made_twice(store: Store) -> None:
    limits = TenantLimits(max_slots=3, max_bytes=10, bases=("a", "b"))
    made = store.projects.create_project(
        name="Mine", organization="acme", limits=limits, project_id="proj_x"
    )
    assert (made.id, made.name, made.organization) == ("proj_x", "Mine", "acme")
    assert (made.limits, made.archived_at, made.deleted_at) == (limits, None, None)
    assert made.created_at == pytest.approx(store.now(), abs=60)
    told = {"name": "Mine", "max_slots": 3, "max_bytes": 10, "bases": ["a", "b"]}
    assert deeds(store, "proj_x") == [("project.created", told)]
    with pytest.raises(ConflictError):
        store.projects.create_project(name="Two", organization="acme", project_id="proj_x")
    store.projects.ensure_project("proj_x", "rival")
    assert store.projects.get_project("proj_x") == made
    first, second = (
        store.projects.create_project(name="Any", organization="acme") for _ in range(2)
    )
    assert first.id != second.id
    assert first.id.startswith(PREFIX)
    assert (first.limits, first.name) == (TenantLimits(), "Any")
    assert store.projects.get_project(PROJECT).name == PROJECT, "one without a name is its id"


def test_limits_change_one_by_one(store: Store) -> None:
    store.projects.update_project(PROJECT, limits={"max_slots": 2, "max_bytes": 10})
    changed = store.projects.update_project(PROJECT, name="New", limits={"max_bytes": None})
    assert (changed.name, changed.limits) == ("New", TenantLimits(max_slots=2))
    assert store.projects.update_project(PROJECT).name == "New"
    assert deeds(store, PROJECT) == [
        ("project.updated", {"name": "New", "max_bytes": None}),
        ("project.updated", {"max_slots": 2, "max_bytes": 10}),
    ]
    assert store.projects.get_project(OTHER).limits == TenantLimits()
    with pytest.raises(NotFoundError):
        store.projects.update_project("proj_gone", name="x")


def test_limits_that_a_newer_version_has_added_are_left_out() -> None:
    stored = {"max_bytes": 5, "later": 1, "bases": ["a"], "wandb_entities": ["b"]}
    assert limits_of(4, stored) == TenantLimits(
        max_slots=4, max_bytes=5, bases=("a",), wandb_entities=("b",)
    )
    assert limits_of(None, None) == TenantLimits()
    assert limits_of(None, {"bases": []}).bases == ()


def test_an_organization_keeps_its_projects_as_it_is_renamed(store: Store) -> None:
    store.projects.ensure_project("proj_2", "acme")
    store.projects.name_organization(PROJECT, "ltd")
    owners = {one.id: one.organization for one in store.projects.list_projects().data}
    assert owners == {PROJECT: "ltd", "proj_2": "ltd", OTHER: "other"}
    store.projects.name_organization(PROJECT, "ltd")
    assert deeds(store, PROJECT) == [("organization.renamed", {"organization": "ltd"})]
    assert deeds(store, "proj_2") == []


def test_lists_go_by_creation_and_then_by_name_through_their_pages(store: Store) -> None:
    set_clock(store, 60)
    for name in ("proj_c", "proj_b"):
        store.projects.ensure_project(name, "acme")
    with store.writing() as connection:
        connection.exec_driver_sql(
            "UPDATE projects SET created_at = 9e9 WHERE id IN ('proj_c', 'proj_b')"
        )
    everyone = [PROJECT, OTHER, "proj_b", "proj_c"]
    assert listed(store) == everyone
    assert listed(store, organization="acme") == [PROJECT, "proj_b", "proj_c"]
    pages = store.projects.list_projects(limit=3)
    assert pages.has_more
    assert not store.projects.list_projects(limit=4).has_more
    for at, name in enumerate(everyone):
        assert listed(store, after=name) == everyone[at + 1 :]
    with pytest.raises(SpecError) as refused:
        listed(store, organization="acme", after=OTHER)
    assert refused.value.param == "after"
    store.projects.archive_project("proj_b")
    assert listed(store) == [PROJECT, OTHER, "proj_c"]
    assert listed(store, archived=True) == everyone
    store.erasure.delete_project("proj_c")
    assert listed(store, archived=True) == [PROJECT, OTHER, "proj_b"]
    assert listed(store, archived=True, deleted=True) == everyone


def test_a_project_is_archived_once_and_the_managing_one_never(store: Store) -> None:
    first = store.projects.archive_project(PROJECT)
    assert first.archived_at == pytest.approx(store.now(), abs=60)
    set_clock(store, 60)
    assert store.projects.archive_project(PROJECT) == first
    assert [deed for deed, _ in deeds(store, PROJECT)] == ["project.archived"]
    assert store.projects.get_project(OTHER).archived_at is None
    store.projects.ensure_project(MANAGING_PROJECT, "acme")
    with pytest.raises(SpecError) as refused:
        store.projects.archive_project(MANAGING_PROJECT)
    assert refused.value.param == "project_id"


def test_only_projects_whose_bytes_are_limited_are_counted(store: Store) -> None:
    store.projects.update_project(OTHER, limits={"max_slots": 1})
    assert store.projects.limited_by_bytes() == []
    store.projects.update_project(PROJECT, limits={"max_bytes": 100})
    assert store.projects.limited_by_bytes() == [PROJECT]
    store.projects.archive_project(PROJECT)
    assert store.projects.limited_by_bytes() == []


def test_bytes_of_models_and_files_fill_a_project_up_to_its_limit(store: Store) -> None:
    store.projects.update_project(PROJECT, limits={"max_bytes": 100})
    store.files.add_file(new_file(bytes=30))
    store.files.add_file(new_file(bytes=1000, project_id=OTHER))
    store.projects.note_model_bytes(PROJECT, 20)
    store.projects.note_model_bytes(OTHER, 1000)
    store.projects.add_model_bytes(PROJECT, 50)
    with pytest.raises(LimitError) as refused:
        store.projects.add_model_bytes(PROJECT, 1)
    assert refused.value.code == "storage_limit"
    store.projects.add_model_bytes(OTHER, 1)
    store.projects.note_model_bytes(PROJECT, 69)
    store.projects.add_model_bytes(PROJECT, 1)
    with pytest.raises(LimitError):
        store.files.add_file(new_file(bytes=1))


def test_nothing_is_stored_in_a_deleted_project(store: Store) -> None:
    store.erasure.delete_project(PROJECT)
    for act in (
        lambda: store.projects.get_project(PROJECT),
        lambda: store.projects.update_project(PROJECT, name="x"),
        lambda: store.projects.add_model_bytes(PROJECT, 1),
        lambda: store.files.add_file(new_file()),
    ):
        with pytest.raises(NotFoundError):
            act()
    assert isinstance(store.projects.get_project(OTHER), Project)
