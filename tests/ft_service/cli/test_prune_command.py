from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ft_service.cli.root_command import run


@pytest.fixture
def leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    path = tmp_path / "files" / "file-unknown"
    path.parent.mkdir()
    path.write_text("12345")
    os.utime(path, (1, 1))
    return path


def test_a_dry_run_lists_exactly_what_the_real_one_removes(
    leftover: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prune", "--dry-run", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(item["kind"], item["path"], item["bytes"]) for item in listed] == [
        ("leftover", str(leftover), 5)
    ]
    assert leftover.exists()
    assert run(["prune", "--json", "--runs-days", "30"]) == 0
    assert json.loads(capsys.readouterr().out) == listed
    assert not leftover.exists()
    assert run(["prune"]) == 0
    assert capsys.readouterr().out == "Nothing to remove.\n"


def test_text_names_path_and_reason(leftover: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert str(leftover) in out
    assert "no file record belongs to it" in out
    assert "would be freed" in out
