from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_service.cli.local_store import with_sample_base
from ft_service.installation import SAMPLE_MODELS
from ft_service.settings import Settings
from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, job_body


def test_the_page_is_opened_at_the_job_that_a_word_means(
    ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.jobs["ftjob-1"] = job_body(suffix="mine")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)))
    ended = ft("open", "mine")
    assert (ended.out.split(), opened) == (
        opened,
        ["http://service.test/sign-in?link=once&to=/jobs/ftjob-1"],
    )
    assert ended.err.startswith("There is no browser here. Open this link in one")
    assert ft("open", "other", "--print").err.startswith("ft: There is no job 'other'.")


def test_without_the_web_packages_serve_says_what_to_install(
    ft: Ft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "api.server", None)
    monkeypatch.setattr(sys, "meta_path", [_Hide("uvicorn"), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] in ("api", "uvicorn")]:
        monkeypatch.delitem(sys.modules, name)
    ended = ft("serve")
    assert (ended.code, ended.err) == (
        1,
        "ft: The server needs uvicorn, which is not installed: pip install 'ft-service[api]'.\n",
    )


@pytest.mark.parametrize("command", ["serve", "reconcile"])
def test_the_sample_base_is_offered_unless_folders_are_named(
    ft: Ft, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    started: list[list[Path]] = []

    def start(settings: Settings, **_: object) -> None:
        started.append(settings.model_folders())

    stand_in = SimpleNamespace(serve=start, reconcile_only=start)
    monkeypatch.setattr("ft_service.cli.serve_command._server", lambda: stand_in)
    assert ft(command).code == 0
    monkeypatch.setenv("FT_MODELS", str(tmp_path))
    assert ft(command).code == 0
    monkeypatch.delenv("FT_MODELS")
    monkeypatch.setattr("ft_service.cli.local_store.SAMPLE_MODELS", tmp_path / "none")
    assert ft(command).code == 0
    assert started == [[home / "models", SAMPLE_MODELS], [tmp_path], [home / "models"]]


def test_pods_get_no_folder_that_only_this_host_has() -> None:
    in_pods = Settings.model_construct(home=Path("/home"), models=[], launcher="kubernetes")
    assert with_sample_base(in_pods).model_folders() == [Path("/home/models")]


class _Hide:
    """An import finder that knows nothing of one package, and says so first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
