"""Set-up says what is missing before it installs anything, and the pinned versions are those that
pyproject.toml allows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
SET_BY_MAKE = ("FT_HOME", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
"""Variables that `make test` passes to the tests."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SET_BY_MAKE}
    return subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(checkout: Path, version: str, lacks: str) -> str:
    """An interpreter that fails every check whose code contains `lacks`."""
    path = checkout / "python"
    cases = ["-V) echo Python " + version, f"*{lacks}*) exit 1", "*%d*) echo python3.12-venv"]
    path.write_text(
        '#!/bin/sh\ncase "$*" in\n' + "".join(f"{case} ;;\n" for case in cases) + "esac\n"
    )
    path.chmod(0o755)
    return f"PYTHON={path}"


def test_a_missing_interpreter_is_named_with_what_to_install(checkout: Path) -> None:
    ended = make(checkout, "test", "PYTHON=python-not-there")
    assert ended.returncode != 0
    assert "python-not-there was not found. Install Python 3.11, 3.12 or 3.13" in ended.stderr
    assert not (checkout / ".venv").exists()


def test_an_interpreter_of_another_version_is_refused(checkout: Path) -> None:
    ended = make(checkout, "test", fake_python(checkout, "3.10.1", "version_info[[]:2]"))
    assert ended.returncode != 0
    assert "is Python 3.10.1, and 3.11, 3.12 or 3.13 is needed" in ended.stderr
    assert not (checkout / ".venv").exists()


def test_missing_venv_names_the_package(checkout: Path) -> None:
    ended = make(checkout, "test", fake_python(checkout, "3.12.1", "ensurepip"))
    assert ended.returncode != 0
    assert "apt install python3.12-venv" in ended.stderr
    assert not (checkout / ".venv").exists()


def test_nothing_is_installed_again_once_it_is_there(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.ready").touch()
    assert make(checkout, "--question", ".venv/.ready").returncode == 0
    (checkout / ".venv/.ready").unlink()
    assert make(checkout, "--question", ".venv/.ready").returncode == 1


def test_check_docs_looks_where_tests_are_marked_so() -> None:
    command = re.search(r'-m "docs and not slow" (.+)', (ROOT / "Makefile").read_text())
    assert command is not None
    looked = {path for pattern in command[1].split() for path in ROOT.glob(pattern)}
    marked = {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark = |@)pytest\.mark\.docs", path.read_text(), re.MULTILINE)
    }
    assert len(marked) >= 4
    assert not [path for path in marked if not looked & {path, *path.parents}]


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonical(name): version
        for name, version in (line.split("==") for line in lines if line[0] != "#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    own = project["name"]  # an extra made of other extras
    for requirement in (one for one in map(Requirement, wanted) if one.name != own):
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), requirement


def test_every_pinned_version_can_be_had_by_the_oldest_python() -> None:
    """Debian 12 has 3.11.2, where a release that wants 3.11.5 cannot be installed, and pip says
    that versions conflict.
    """
    pins = [
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line[0] != "#"
    ]
    installed = {
        canonical(found.name): found.metadata["Requires-Python"] for found in distributions()
    }
    wanted = {name: installed[canonical(name)] for name in pins if installed.get(canonical(name))}
    assert len(wanted) > 60
    assert {
        name: asked for name, asked in wanted.items() if "3.11.0" not in SpecifierSet(asked)
    } == {}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def test_no_package_index_is_written_down() -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        assert "://" not in (ROOT / name).read_text().replace("postgresql+psycopg://", "")


@pytest.mark.parametrize(("code", "of_make"), [(130, 0), (0, 0), (1, 2)])
def test_a_quickstart_that_was_paused_is_no_error(checkout: Path, code: int, of_make: int) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/.ready").touch()
    command = checkout / ".venv/bin/ft"
    command.write_text(f'#!/bin/sh\necho "$FT_HOME" "$@"\nexit {code}\n')
    command.chmod(0o755)
    ended = make(checkout, "quickstart")
    assert ended.returncode == of_make
    assert ended.stdout.splitlines()[0] == f"{checkout}/.ft quickstart --called make quickstart"
    assert ("Error" in ended.stderr) == bool(of_make)
