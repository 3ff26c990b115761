"""Fixtures for tests of the command line: import them into a conftest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ft_service.cli.root_command import run


@dataclass
class Ended:
    """What one command line did."""

    code: int
    out: str
    err: str


Ft = Callable[..., Ended]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty FT_HOME, and nothing else of the environment that the command line reads."""
    for name in (
        "FT_MODELS",
        "FT_DATABASE_URL",
        "FT_BASE_URL",
        "FT_API_KEY",
        "OPENAI_BASE_URL",
        "OPENAI_API_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def ft(home: Path, capsys: pytest.CaptureFixture[str]) -> Ft:
    """Run a command line in this process."""

    def call(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return call
