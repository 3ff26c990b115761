"""Numbers that cannot be right stop the job, on all ranks, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import VOCABULARY, save_tiny_llama, spec_for
from workers.base.load import load
from workers.model.build import build
from workers.quant.rowwise import RowQuantized
from workers.ranks.runtime import COMPUTE_DTYPE, TrainingError
from workers.ranks.sharding import shard
from workers.training.guards import STEPS_UNTIL_CHANGE, AdapterWatch, check_gathered_weights, check_step, checksum
from workers.training.step import Sums

CPU = torch.device("cpu")


def check_on_rank(rank: int, world: int, spec: JobSpec, fault: str) -> str:
    """Build, load and check; the error's text, if any. The fault is of one rank only."""
    built = build(spec, CPU)
    dtype = COMPUTE_DTYPE[spec.precision.compute]
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    shard(built.peft_model, built.layers, mesh, spec.distributed, dtype)
    load(built.peft_model, spec.model.path, seed=1, compute_dtype=dtype, device=CPU)
    if rank == world - 1:
        break_gather(fault)
    try:
        check_gathered_weights(built.peft_model, dtype)
    except TrainingError as error:
        return error.message
    return ""


def break_gather(fault: str) -> None:
    original = RowQuantized.fsdp_post_all_gather

    def broken(self: RowQuantized, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if fault == "a bit":
            outputs[0].view(torch.uint8)[0, 0] ^= 1
        elif fault == "the order of the shards":
            outputs[0].copy_(outputs[0].flip(0))
        return original(self, outputs, *args, **kwargs)

    if fault:
        RowQuantized.fsdp_post_all_gather = broken


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("fault", ["", "a bit", "the order of the shards"])
def test_gathered_weights_are_those_that_were_read(tmp_path: Path, fault: str, compute: str) -> None:
    model = save_tiny_llama(tmp_path / "base", vocab_size=VOCABULARY + 1, intermediate_size=200)
    overrides = {".*q_proj": "fp8", ".*up_proj": "bf16"}
    spec = spec_for(model, ranks=3, precision={"default": "nf4", "overrides": overrides, "compute": compute})
    messages = run_on_ranks(check_on_rank, 3, spec, fault)
    if not fault:
        assert messages == ["", "", ""]
    else:
        assert len(set(messages)) == 1, "all ranks say the same"
        assert "are not what was read" in messages[0]


def test_checksum_sees_values_and_positions() -> None:
    a = torch.arange(1000, dtype=torch.float32)
    assert checksum(a) == checksum(a.clone())
    swapped = a.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert checksum(swapped) != checksum(a)
    assert checksum(torch.zeros(5, dtype=torch.uint8)) == 0
    assert checksum(torch.tensor([], dtype=torch.bfloat16)) == 0


def test_checksum_sees_positions_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.arange(1, 33, dtype=torch.int64)
    whole = checksum(a)
    monkeypatch.setattr("workers.training.guards._CHUNK", 8)
    assert checksum(a) == whole
    assert checksum(a.view(2, 16).flip(0)) != whole


@pytest.mark.parametrize(
    ("sums", "norm", "says"),
    [
        (Sums(float("nan"), 0, 4), 1.0, "step 9 the loss was not a finite number"),
        (Sums(2.0, 0, 4), float("inf"), "step 9 the gradient norm was not a finite number"),
        (Sums(0.0, 4, 4), 1.0, "loss of 4 target tokens was exactly 0"),
    ],
)
def test_impossible_steps_are_refused(sums: Sums, norm: float, says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        check_step(9, sums, norm)


def test_possible_steps_pass() -> None:
    check_step(9, Sums(2.0, 0, 4), 1.0)
    check_step(9, Sums(0.0, 0, 0), 0.0)


def watch(rank: int, world: int, changes_on: int, learning_rate: float, changes_at: int) -> tuple[str, int]:
    """What is said, and after which step."""
    parameter, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    told: list[str] = []
    name = "base_model.model.{}.lora_B.default.weight"
    watched = AdapterWatch({name.format("layer"): parameter, name.format("dt_proj"): other}, told.append)
    step = 0
    try:
        for step in range(1, STEPS_UNTIL_CHANGE + 1):
            if rank == changes_on and step == changes_at:
                parameter.data[2] = 1.0
            watched.after_step(learning_rate)
            if told:
                return told[0], step
    except TrainingError as error:
        return error.code, step
    return "", 0


@pytest.mark.parametrize(
    ("changes_on", "changes_at", "learning_rate", "code"),
    [(1, 1, 0.1, ""), (1, STEPS_UNTIL_CHANGE, 0.1, ""), (-1, STEPS_UNTIL_CHANGE, 0.1, "adapter_unchanged"), (-1, 0, 0.0, "")],
)
def test_an_adapter_that_never_changes_is_noticed(changes_on: int, changes_at: int, learning_rate: float, code: str) -> None:
    """A part of it at once, the whole of it after a few steps."""
    told = "The adapters of 1 modules get no gradient and stay as they were: dt_proj. Leave them out of lora.target_modules."
    expected = (told if changes_on >= 0 else code), changes_at
    assert run_on_ranks(watch, 2, changes_on, learning_rate, changes_at) == [expected, expected]
