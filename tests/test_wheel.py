"""The built wheel has all that the repository has of the packages, and no top-level package but
ft_service.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from ft_service.installation import BUNDLED, PYTHONPATH, ROOT, python_path, root_of
from ft_service.version import this_version
from tests.support.wheels import build_wheel

pytestmark = pytest.mark.docs
CORE = "ft_service"
BESIDE = (
    "api",
    "workers",
    "examples/data",
    "examples/descriptions",
    "examples/models",
    "examples/evaluate.py",
)
SPEC = "deploy/examples/quickstart.yaml"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_has_everything_of_the_packages(names: set[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", CORE, *BESIDE, SPEC],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert {Path(name).suffix for name in tracked} >= {
        ".py",
        ".html",
        ".js",
        ".css",
        ".yaml",
        ".jsonl",
        ".safetensors",
    }
    expected = {
        name if name.startswith(f"{CORE}/") else f"{CORE}/{BUNDLED}/{name}" for name in tracked
    }
    assert sorted(expected - names) == []


def test_the_only_top_level_package_is_ours(names: set[str]) -> None:
    assert {name.partition("/")[0] for name in names} == {
        CORE,
        f"{CORE}-{this_version()}.dist-info",
    }
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_the_wheels_metadata_say_what_the_project_says(wheel: Path) -> None:
    information = f"{CORE}-{this_version()}.dist-info"
    with zipfile.ZipFile(wheel) as file:
        metadata = Parser().parsestr(file.read(f"{information}/METADATA").decode())
        scripts = file.read(f"{information}/entry_points.txt").decode()
    assert metadata["Version"] == this_version()
    assert set(re.findall(r"^([\w-]+) = ft_service\.cli:main$", scripts, re.MULTILINE)) == {
        "ft",
        "ft-service",
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(metadata.get_all("Provides-Extra", [])) == set(extras)
    (all_of,) = extras["all"]
    assert set(re.findall(r"[\w-]+", all_of.partition("[")[2])) == set(extras) - {
        "all",
        "bench",
        "docs",
        "dev",
    }


def test_packages_are_beside_or_inside_of_ours(tmp_path: Path) -> None:
    package = tmp_path / CORE
    package.mkdir()
    assert root_of(package) == tmp_path
    (package / BUNDLED).mkdir()
    assert root_of(package) == package / BUNDLED
    assert (ROOT / CORE / "installation.py").is_file(), "tests run from the repository"


def test_our_folder_is_the_first_of_a_childs_path() -> None:
    assert python_path({}) == str(ROOT)
    assert python_path({PYTHONPATH: "/foreign:/other"}) == f"{ROOT}:/foreign:/other"
    assert python_path({PYTHONPATH: f"{ROOT}:/other"}) == f"{ROOT}:/other"
