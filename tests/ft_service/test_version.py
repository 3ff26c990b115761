"""What a build is called: by a release, or by the one to come and its commit."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ft_service import NEXT, __version__, version
from ft_service.installation import ROOT
from ft_service.version import COMMIT, base_version, this_version, version_of

HASH = "1a2b3c4d5e6f"


@pytest.fixture(autouse=True)
def no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT, raising=False)


def commit_in(folder: Path) -> str:
    """Make a repository with a commit of nothing; its commit."""
    name = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), (*name, "commit", "-q", "--allow-empty", "-m", "a")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    head = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()


def test_a_build_between_releases_is_the_next_one_with_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "NEXT", "9.9.0")
    commit = commit_in(tmp_path)
    assert version_of(tmp_path) == f"9.9.0.dev0+g{commit[:10]}"
    (tmp_path / "unpacked").mkdir()
    assert version_of(tmp_path / "unpacked") == "9.9.0.dev0", "not the repository's around it"
    monkeypatch.setenv(COMMIT, HASH)
    assert version_of(tmp_path / "unpacked") == f"9.9.0.dev0+g{HASH[:10]}"
    monkeypatch.setenv(COMMIT, "main; x")
    assert version_of(tmp_path) == "9.9.0.dev0"
    monkeypatch.delenv(COMMIT)
    monkeypatch.setenv("PATH", "")
    assert version_of(tmp_path) == "9.9.0.dev0", "without git"


def test_a_release_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "NEXT", "")
    assert version_of(ROOT) == base_version() == __version__


def test_this_checkout_says_what_it_is() -> None:
    assert this_version().startswith(base_version())
    if NEXT:
        newer = [tuple(map(int, text.split("."))) for text in (__version__, NEXT)]
        assert newer[0] < newer[1]


@pytest.mark.docs
def test_a_build_from_the_sources_of_a_build_keeps_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT, HASH)
    build = [sys.executable, "-m", "hatchling", "build", "--target"]
    subprocess.run([*build, "sdist", "--directory", str(tmp_path)], cwd=ROOT, check=True)
    monkeypatch.delenv(COMMIT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    subprocess.run([*build, "wheel", "--directory", str(tmp_path)], cwd=folder, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    expected = f"{base_version()}+g{HASH[:10]}" if NEXT else __version__
    assert re.findall(r"^ft_service-(.+)-py3-none-any", wheel.name) == [expected]
