from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.cli import merge_command
from tests.support.command_line import Ft
from tests.support.run_directories import finished_run, flip_a_bit

REPORT = {
    "to": "fp8",
    "rounding": {"relative_to_weights": 0.02, "relative_to_update": 0.5},
    "validation_loss": {
        "adapter_on_base_as_trained": 1.5,
        "adapter_on_bf16_base": 1.25,
        "merged": 1.375,
    },
    "samples": 5,
}


@pytest.mark.parametrize(
    ("to", "loss", "named"),
    [
        ("nvfp4", 1.53, "precision.served_as: nvfp4, which"),
        ("merged-int4", 1.53, "int4_g128 or int4_g64 or int4_g32, which"),
        ("torchao-8da4w", 1.53, "precision.served_as: 8da4w"),
        ("nvfp4", 1.51, None),
        ("bf16", 1.53, None),
        ("gguf", 1.53, None),
    ],
)
def test_a_loss_by_rounding_beyond_the_bound_is_met_with_advice(
    to: str, loss: float, named: str | None
) -> None:
    losses = {**REPORT["validation_loss"], "merged": loss}
    fields = dict(merge_command.loss_fields({**REPORT, "to": to, "validation_loss": losses}))
    advice = fields["advice"]
    if named is None:
        assert advice is None
    else:
        assert advice is not None
        assert advice.startswith("rounding costs 0.0300 nats, more than 0.02: ")
        assert named in advice


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the worker was asked; it answers REPORT."""
    found: list[Any] = []

    def run_worker(module: str, arguments: list[str]) -> dict[str, Any]:
        found.append((module, arguments))
        return REPORT

    monkeypatch.setattr(merge_command, "run_worker", run_worker)
    return found


def test_a_run_directory_is_merged_and_its_losses_shown(
    ft: Ft, tmp_path: Path, calls: list[Any]
) -> None:
    run = finished_run(tmp_path)
    ended = ft("merge", run.root, "--to", "fp8", "--out", tmp_path / "out", "--samples", "5")
    assert (ended.code, ended.err.startswith("Merging file by file")) == (0, True)
    assert ended.out.split("\n")[:3] == [
        "loss, base as trained  1.5000",
        "loss, bf16 base        1.2500",
        "loss, merged to fp8    1.3750",
    ]
    adapter, out, *options = calls[0][1]
    assert (calls[0][0], adapter, out) == (
        "workers.tasks.merge",
        str(run.path("adapter")),
        str(tmp_path / "out"),
    )
    assert options == ["--to", "fp8", "--max-file-gib", "5.0", "--samples", "5"]


def test_a_job_of_this_machine_by_its_id(
    ft: Ft, tmp_path: Path, home: Path, calls: list[Any]
) -> None:
    run = finished_run(tmp_path)
    (home / "runs").mkdir(parents=True)
    run.root.rename(home / "runs/ftjob-1")
    document = json.loads(
        ft("merge", "ftjob-1", "--to", "bf16", "--out", tmp_path / "out", "--json").out
    )
    assert document == {"out": str(tmp_path / "out"), **REPORT}
    assert calls[0][1][0] == str(home / "runs/ftjob-1/adapter")


def test_what_cannot_be_merged(ft: Ft, tmp_path: Path, calls: list[Any]) -> None:
    run = finished_run(tmp_path)
    taken = ft("merge", run.root, "--to", "bf16", "--out", tmp_path)
    assert (taken.code, "exists already" in taken.err) == (64, True)
    assert ft("merge", run.root, "--to", "int3", "--out", tmp_path / "out").code == 64
    endless = ft(
        "merge", run.root, "--to", "bf16", "--out", tmp_path / "out", "--max-file-gib", "inf"
    )
    assert (endless.code, "at most 10000, not inf" in endless.err) == (64, True)
    flip_a_bit(run.path("adapter/adapter_model.safetensors"))
    ended = ft("merge", run.root, "--to", "bf16", "--out", tmp_path / "out")
    assert ended.code == 1
    assert "adapter_model.safetensors has other contents than when it was written" in ended.err
    assert calls == []
