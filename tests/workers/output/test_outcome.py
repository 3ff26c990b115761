"""An adapter is published only if another process reads from the disk what was trained."""

from __future__ import annotations

import json
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from tests.support.killed_helpers import Killer, is_done_in_the_end
from tests.support.training.models import spec_for
from workers.job.reread_adapter import WEIGHTS, differences
from workers.output import outcome
from workers.output.model_shards import write_file
from workers.ranks.runtime import ExportError

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def tensors() -> dict[str, torch.Tensor]:
    return {NAME.format("A"): torch.randn(2, 8), NAME.format("B"): torch.randn(6, 2)}


def write(folder: Path, given: dict[str, torch.Tensor]) -> None:
    shapes = {name: tensor.shape for name, tensor in given.items()}
    (folder / "config.json").write_text('{"model_type": "llama"}')
    outcome.write_adapter(
        folder, shapes, given.items(), LoraConfig(r=2, target_modules=["q_proj"]), spec_for(folder)
    )


def test_what_is_written_is_read_back_by_another_process(tmp_path: Path) -> None:
    given = tensors()
    write(tmp_path, given)
    stored = load_file(tmp_path / WEIGHTS)
    assert stored.keys() == given.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in given.items())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2


def test_the_other_process_starts_without_torch(tmp_path: Path) -> None:
    """Its import costs seconds of a core, for every checkpoint."""
    with patch.object(outcome, "run_once", wraps=outcome.run_once) as run:
        write(tmp_path, tensors())
    program, request = run.call_args.args
    interpreter, *command = program.command
    again = [interpreter, "-X", "importtime", *command]
    done = subprocess.run(
        again, input=json.dumps(request), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
    assert "safetensors" in done.stderr
    assert "torch" not in done.stderr.replace("safetensors.torch", "")


def test_a_reading_back_that_the_host_kills_is_no_fault_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tensors()
    write(tmp_path, given)
    digests = {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in given.items()}

    def read_back(_: str) -> None:
        outcome._check_in_fresh_process(tmp_path, digests)

    is_done_in_the_end(Killer(tmp_path, monkeypatch), read_back)


@pytest.mark.parametrize(
    "damage",
    [lambda body: body[:-1] + bytes([body[-1] ^ 1]), lambda body: body[:-4]],
    ids=["flip", "cut"],
)
def test_another_adapter_than_the_trained_one_is_not_published(tmp_path: Path, damage: Any) -> None:
    def damaging(path: Path, *arguments: Any) -> None:
        write_file(path, *arguments)
        path.write_bytes(damage(path.read_bytes()))

    with (
        patch.object(outcome, "write_file", damaging),
        pytest.raises(ExportError, match="is not the one that was trained: "),
        outcome.new_folder(tmp_path / "adapter") as folder,
    ):
        write(folder, tensors())
    assert not list(tmp_path.iterdir())


def test_differences_name_what_is_missing_changed_and_too_much(tmp_path: Path) -> None:
    given = tensors()
    write(tmp_path, given)
    faults = differences(tmp_path, {NAME.format("A"): "0" * 64, "another": "0" * 64})
    assert faults == [
        "another is missing",
        f"{NAME.format('B')} does not belong there",
        f"{NAME.format('A')} has other values",
    ]
