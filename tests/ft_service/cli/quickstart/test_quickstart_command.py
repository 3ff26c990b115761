"""What `ft quickstart` says before it runs anything."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from ft_service.installation import SAMPLE_DATA
from tests.support.command_line import Ft

COMMAND = "ft_service.cli.quickstart.quickstart_command"


def test_what_is_not_installed_is_named_at_once(
    ft: Ft, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        f"{COMMAND}.find_spec",
        lambda name: None if name in ("torch", "openai") else find_spec(name),
    )
    ended = ft("quickstart")
    assert (ended.code, ended.out) == (1, "")
    assert (
        ended.err == "ft: The quickstart needs openai, torch: pip install "
        "'ft-service[quickstart,api,workers]'.\n"
    )
    assert not home.exists()


def test_an_installation_without_the_sample_says_so(
    ft: Ft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{COMMAND}.SAMPLE_MODELS", tmp_path / "none")
    assert "This installation has no sample base: " in ft("quickstart").err


def test_a_copy_of_the_sample_is_planned_where_it_is(ft: Ft, tmp_path: Path) -> None:
    copied = ft("quickstart", "--copy", tmp_path / "mine", "--json")
    spec = Path(json.loads(copied.out)["spec"])
    assert {path.name for path in spec.parent.iterdir()} == {
        "quickstart.yaml",
        "train.jsonl",
        "validation.jsonl",
    }
    assert spec.with_name("train.jsonl").read_bytes() == (SAMPLE_DATA / "train.jsonl").read_bytes()
    assert "150 steps over " in ft("plan", spec, "--hardware", "H100").out
    again = ft("quickstart", "--copy", tmp_path / "mine")
    assert (again.code, "quickstart.yaml is there already" in again.err) == (64, True)
