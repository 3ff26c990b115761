"""Pulls that were asked for: which are taken, in what order, and where they are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.control.bases import base_pulls
from ft_service.control.bases.base_pulls import PullFolder, staged_bases
from ft_service.errors import LimitError, NotFoundError, SpecError
from ft_service.host.lifetime import try_lock
from ft_service.installation import SAMPLE_MODELS
from ft_service.settings import Settings
from tests.support.pulled import looked_up


@pytest.fixture
def folder(tmp_path: Path) -> PullFolder:
    return PullFolder(tmp_path / "models")


def test_every_server_sees_the_same_pulls(folder: PullFolder) -> None:
    first = folder.add("org/a", None, look=True, anyway=False)
    second = folder.add("https://elsewhere.example/org/b@v2", "mine/b", look=False, anyway=True)
    other = PullFolder(folder.models)
    assert {pull.id for pull in other.pulls()} == {first.id, second.id}
    assert other.find(second.id) == second
    assert (second.repository, second.revision, second.name) == ("org/b", "v2", "mine/b"), (
        "of the hub's own address, whichever was named"
    )


def test_a_base_is_fetched_once_and_goes_on_if_it_is_asked_for_again(folder: PullFolder) -> None:
    asked = folder.add("org/a", None, look=True, anyway=False)
    again = folder.add("org/a", None, look=False, anyway=False)
    assert (again.id, again.look, again.state) == (asked.id, False, "queued")
    assert folder.stop(asked.id).state == "stopped"
    assert folder.stop(asked.id).state == "stopped"
    assert folder.add("org/a", None, look=False, anyway=False).state == "queued"
    for model, name in (("org/a@v2", None), ("org/a", "other"), ("org/b", "org/a")):
        with pytest.raises(SpecError) as caught:
            folder.add(model, name, look=False, anyway=False)
        assert caught.value.code == "pull_exists"
    (folder.models / "org/c").mkdir(parents=True)
    with pytest.raises(SpecError) as caught:
        folder.add("org/c", None, look=False, anyway=False)
    assert caught.value.code == "model_exists"


@pytest.mark.parametrize(
    ("model", "name", "param"),
    [("tiny", None, "model"), ("../..", None, "model"), ("org/a@", None, "model")]
    + [("org/a", name, "name") for name in ("../x", "/x", ".x/y", "ft:x", "a\nb", "-x", "x" * 300)],
)
def test_a_name_that_is_none_is_refused_and_nothing_is_written(
    folder: PullFolder, model: str, name: str | None, param: str
) -> None:
    with pytest.raises(SpecError) as caught:
        folder.add(model, name, look=False, anyway=False)
    assert caught.value.param == param
    assert not folder.models.exists()


@pytest.mark.parametrize("pull_id", ["pull-none", "../x", "pull-../../x", ""])
def test_an_id_of_no_pull_is_looked_for_nowhere_else(folder: PullFolder, pull_id: str) -> None:
    for ask in (folder.find, folder.stop, folder.go_on, folder.remove):
        with pytest.raises(NotFoundError):
            ask(pull_id)
    assert not folder.models.exists()


def test_only_so_many_wait(folder: PullFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_pulls, "MOST_WAITING", 2)
    first, _ = (folder.add(f"org/{name}", None, look=False, anyway=False) for name in "ab")
    with pytest.raises(LimitError) as caught:
        folder.add("org/c", None, look=False, anyway=False)
    assert caught.value.code == "queue_limit"
    folder.stop(first.id)
    third = folder.add("org/c", None, look=False, anyway=False)
    with pytest.raises(LimitError):
        folder.go_on(first.id)
    monkeypatch.setattr(base_pulls, "MOST_KEPT", 3)
    folder.stop(third.id)
    with pytest.raises(LimitError, match="3 pulls are not done"):
        folder.add("org/d", None, look=False, anyway=False)


def test_a_folder_that_cannot_be_written_is_told_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("no folder")
    with pytest.raises(SpecError, match="cannot be written: Not a directory") as caught:
        PullFolder(tmp_path / "models").add("org/a", None, look=False, anyway=False)
    assert (caught.value.param, caught.value.code) == ("FT_MODELS", "models_not_writable")
    assert PullFolder(tmp_path / "models").pulls() == []
    assert PullFolder.of(Settings(home=tmp_path, models=[SAMPLE_MODELS])) is None


def test_a_pull_whose_server_has_ended_waits_and_a_whole_one_is_verified(
    folder: PullFolder,
) -> None:
    pull = folder.add("org/a", None, look=False, anyway=False)
    pull = looked_up(folder.models, pull.id, state="fetching")
    state, arrived = folder.progress(pull)
    assert (state, arrived > 0) == ("queued", True)
    lock = try_lock(folder.running_lock)
    assert lock is not None
    assert folder.progress(pull) == ("fetching", arrived)
    assert folder.progress(pull.model_copy(update={"bytes": arrived})) == ("verifying", arrived)


def test_what_has_arrived_is_planned_with_until_it_is_removed(folder: PullFolder) -> None:
    settings = Settings(home=folder.models.parent, models=[folder.models])
    pull = folder.add("org/a", "mine", look=True, anyway=False)
    assert list(staged_bases(settings)) == []
    pull = looked_up(folder.models, pull.id)
    assert list(staged_bases(settings)) == [("mine", folder.staged(pull))]
    folder.remove(pull.id)
    assert (list(staged_bases(settings)), folder.pulls()) == ([], [])
    assert {path.suffix for path in folder.path.iterdir()} == {".lock"}
