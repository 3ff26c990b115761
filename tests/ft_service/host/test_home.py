from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.cli.root_command import run
from ft_service.host.home import create_home, openness
from ft_service.store.sql import migrate, open_store


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_home_is_its_owners_alone(tmp_path: Path) -> None:
    home = tmp_path / "a" / "home"
    create_home(home)
    assert mode(home) == 0o700
    assert openness(home) is None
    create_home(home)


@pytest.mark.parametrize("open_mode", [0o755, 0o750, 0o701])
def test_an_open_home_is_said_and_left_as_it_is(tmp_path: Path, open_mode: int) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(open_mode)
    create_home(home)
    assert f"mode {open_mode:04o}" in (openness(home) or "")
    assert mode(home) == open_mode


def test_the_database_is_its_owners_alone_wherever_it_lies(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new' / 'ft.db'}"
    migrate(url)
    open_store(url).close()
    assert [mode(tmp_path / "new"), mode(tmp_path / "new" / "ft.db")] == [0o700, 0o600]


def test_a_command_that_keeps_something_makes_the_home_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("FT_HOME", str(home))
    assert run(["keys", "create", "--scope", "read", "--json"]) == 0
    assert mode(home) == 0o700
