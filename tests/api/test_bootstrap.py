"""The first start of a service: its keys and the credentials file."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.bootstrap import prepare
from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.store.sql import Store
from tests.support.rest.process import read


def test_the_first_key_may_come_from_a_file(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("ft-chosen-by-the-operator\n")
    given = settings.model_copy(update={"bootstrap_key_file": tmp_path / "key"})

    assert prepare(given, store) == "ft-chosen-by-the-operator"
    assert store.keys.authenticate("ft-chosen-by-the-operator") is not None
    assert prepare(given, store) is None
    assert read(tmp_path / "credentials") == {"api_key": "ft-chosen-by-the-operator"}


@pytest.mark.parametrize("text", [None, "short"])
def test_an_unusable_key_file_is_refused(
    settings: Settings, store: Store, tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    given = settings.model_copy(update={"bootstrap_key_file": tmp_path / "key"})

    with pytest.raises(SpecError):
        prepare(given, store)
    assert not store.keys.has_keys()
    assert not (tmp_path / "credentials").exists()


def test_in_a_cluster_no_key_is_written_and_one_that_was_is_removed(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    """Worker pods mount the volume of FT_HOME."""
    there = settings.home / "credentials"
    cluster = settings.model_copy(update={"launcher": "kubernetes"})
    with pytest.raises(SpecError, match="FT_BOOTSTRAP_KEY_FILE is not set"):
        prepare(cluster, store)
    assert not store.keys.has_keys()
    prepare(settings, store)
    key = read(there)["api_key"]
    assert prepare(cluster, store) is None
    assert not there.exists()
    assert store.keys.authenticate(key) is not None, "it is the Secret's, and continues to work"
    assert prepare(cluster, store) is None
    assert not there.exists()


def test_in_a_cluster_the_first_key_is_the_secrets(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("ft-chosen-by-the-operator\n")
    cluster = settings.model_copy(
        update={"launcher": "kubernetes", "bootstrap_key_file": tmp_path / "key"}
    )
    assert prepare(cluster, store) == "ft-chosen-by-the-operator"
    assert store.keys.authenticate("ft-chosen-by-the-operator") is not None
    assert not (settings.home / "credentials").exists()


@pytest.mark.parametrize("launcher", ["local", "kubernetes"])
def test_of_two_servers_that_begin_at_once_both_serve(
    settings: Settings, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    """Both find a database without keys, and have the same first one."""
    (tmp_path / "key").write_text("ft-chosen-by-the-operator\n")
    given = settings.model_copy(
        update={"launcher": launcher, "bootstrap_key_file": tmp_path / "key"}
    )
    assert prepare(given, store) == "ft-chosen-by-the-operator"
    monkeypatch.setattr(store.keys, "has_keys", lambda: False)  # a moment ago
    assert prepare(given, store) is None
    if launcher == "local":
        assert read(tmp_path / "credentials") == {"api_key": "ft-chosen-by-the-operator"}


def test_credentials_that_are_gone_are_not_made_up(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    prepare(settings, store)
    (tmp_path / "credentials").unlink()

    assert prepare(settings, store) is None
    assert not (tmp_path / "credentials").exists()
    assert len(store.keys.list_keys("default")) == 1


def test_another_name_of_the_organization_is_given_to_all_its_projects(
    settings: Settings, store: Store
) -> None:
    prepare(settings, store)
    team = store.projects.create_project(name="team", organization="local")
    store.projects.ensure_project("foreign", "foreign")
    prepare(settings.model_copy(update={"organization": "acme"}), store)
    assert {store.projects.get_project(name).organization for name in ("default", team.id)} == {
        "acme"
    }
    assert store.projects.get_project("foreign").organization == "foreign"
