from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.cli.root_command import run
from ft_service.host.home import create_home, name_of, openness
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


@pytest.mark.parametrize("home", ["file", "file/within"])
def test_a_home_where_a_file_is_is_refused_with_its_setting(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FT_HOME", str(tmp_path / home))
    assert run(["keys", "list"]) == 64
    assert (
        f"The folder {tmp_path / home} cannot be made: there is a file on its path. Name another "
        "(FT_HOME)." in (capsys.readouterr().err)
    )


@pytest.mark.parametrize("command", [["keys", "list"], ["serve", "--port", "0"]])
def test_a_home_of_somebody_else_is_refused_with_its_owner(
    command: list[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    environment = {**os.environ, "FT_HOME": str(home), "FT_MODELS": "", "COLUMNS": "80"}
    as_user = []
    if os.geteuid() == 0:  # to whom modes do not apply, unless this capability is taken away
        capabilities = "-dac_override,-dac_read_search"
        as_user = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]
    done = subprocess.run(
        [*as_user, sys.executable, "-m", "ft_service.cli", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    user = name_of(os.geteuid())
    assert (
        done.returncode,
        f"{home} is not for {user}: it belongs to {user} and has mode 0500." in done.stderr,
    ) == (64, True)


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


def test_a_command_that_keeps_something_makes_the_home_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("FT_HOME", str(home))
    assert run(["keys", "create", "--scope", "read", "--json"]) == 0
    assert mode(home) == 0o700
