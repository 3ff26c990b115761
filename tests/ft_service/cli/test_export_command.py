from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.cli import export_command
from tests.support.command_line import Ft
from tests.support.run_directories import finished_run, flip_a_bit

REPORT = {
    "to": "gguf",
    "rounding": {"relative_to_weights": 0.02, "relative_to_update": 0.5},
    "validation_loss": {
        "adapter_on_base_as_trained": 1.5,
        "adapter_on_bf16_base": 1.25,
        "merged": 1.375,
    },
    "tensors": 22,
    "exact": 22,
    "relative_error": 0.0,
    "notes": ["its context is cut"],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the worker was asked; it answers REPORT."""
    found: list[Any] = []

    def run_worker(module: str, arguments: list[str]) -> dict[str, Any]:
        found.append((module, arguments))
        return REPORT

    monkeypatch.setattr(export_command, "run_worker", run_worker)
    return found


def test_a_form_that_a_worker_makes_and_what_it_costs(
    ft: Ft, tmp_path: Path, calls: list[Any]
) -> None:
    run = finished_run(tmp_path)
    ended = ft(
        "export",
        run.root,
        "--format",
        "gguf",
        "--out",
        tmp_path / "out",
        "--samples",
        "5",
        "--base",
        tmp_path / "base",
    )
    assert ended.code == 0
    assert calls == [
        (
            "workers.tasks.export",
            [
                str(run.path("adapter")),
                str(tmp_path / "out"),
                "--format",
                "gguf",
                "--samples",
                "5",
                "--base",
                f"{tmp_path}/base",
            ],
        )
    ]
    assert "loss, merged to gguf" in ended.out
    assert "22 of 22 tensors identical" in ended.out
    assert "its context is cut" in ended.out
    shown = json.loads(
        ft("export", run.root, "--format", "gguf", "--out", tmp_path / "out", "--json").out
    )
    assert shown == {"out": str(tmp_path / "out"), "format": "gguf", **REPORT}


def test_the_adapter_as_it_is_needs_no_worker_and_no_torch(
    ft: Ft, tmp_path: Path, calls: list[Any]
) -> None:
    run = finished_run(tmp_path)
    assert ft("export", run.root, "--format", "peft", "--out", tmp_path / "out").code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in run.path("adapter").iterdir()
    }
    assert calls == []


def test_what_is_not_exported(ft: Ft, tmp_path: Path, calls: list[Any]) -> None:
    run = finished_run(tmp_path)
    assert ft("export", run.root, "--format", "peft", "--out", tmp_path).code == 64, (
        "it is there already"
    )
    assert ft("export", run.root, "--format", "onnx", "--out", tmp_path / "out").code == 64
    flip_a_bit(run.path("adapter/adapter_model.safetensors"))
    ended = ft("export", run.root, "--format", "gguf", "--out", tmp_path / "out")
    assert (ended.code, "has changed since it was written" in ended.err, calls) == (1, True, [])
