from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_service.cli import export_command
from ft_service.cli.app import run


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "manifest.json").write_text("{}")
    return folder


def test_the_form_for_vllm_leaves_no_manifest_of_another(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pad(module: str, arguments: list[str]) -> dict[str, object]:
        assert module == "workers.tasks.pad_ranks"
        assert arguments[0] == str(adapter)
        (Path(arguments[1]) / "adapter_config.json").write_text('{"r": 7}')
        return {"r": 7}

    class Whole:
        faults: tuple[str, ...] = ()

    monkeypatch.setattr(export_command, "run_worker", pad)
    monkeypatch.setattr(export_command, "verify", lambda folder: Whole())
    out = tmp_path / "out"
    assert run(["export", str(adapter), "--format", "vllm", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "format": "vllm", "r": 7}
    assert [path.name for path in out.iterdir()] == ["adapter_config.json"]
    assert run(["export", str(adapter), "--format", "peft", "--out", str(out)]) == 64, "it is there already"
