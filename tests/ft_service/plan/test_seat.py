from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.engines.sharing import WORTH_GAIN
from ft_service.plan.job import Plan
from ft_service.plan.machines import MACHINES, Machine
from ft_service.plan.seat import START_SECONDS, sharing_gain
from ft_service.plan.speed import Speed
from tests.support.plans import H100, plan_8b

QLORA: dict[str, Any] = {
    "precision": {"default": "nf4"},
    "training": {"batch_size": 8, "per_device_train_batch_size": 4, "max_length": 2048, "tokens_per_micro_batch": 8192},
}
STEP = Speed(1000.0, 1.0, compute_seconds=0.2, dequantise_seconds=0.6, wire_seconds=1.0, launch_seconds=0.1)


def sharded(tmp_path: Path, ranks: int = 2, machine: Machine = H100, **options: Any) -> Plan:
    options = {**QLORA, **options}
    options["distributed"] = {"replicate": 1, "activation_checkpointing": "full", **options.get("distributed", {})}
    return plan_8b(tmp_path, ranks, machine, **options)


def test_a_seat_holds_the_adapters_sharded_whole_and_with_the_sums_of_their_gradients(tmp_path: Path) -> None:
    its_plan = sharded(tmp_path)
    adapters = its_plan.adapter_parameters
    masters_gradients_and_moments = 4 * 4 * adapters // 2
    whole_and_sums = (2 + 4) * adapters
    assert its_plan.seat.held == pytest.approx(masters_gradients_and_moments + whole_and_sums, rel=1e-3)


def test_where_nothing_is_sharded_lanes_compute_with_the_masters_themselves(tmp_path: Path) -> None:
    its_plan = sharded(tmp_path, ranks=1)
    assert its_plan.seat.held == pytest.approx(4 * 4 * its_plan.adapter_parameters, rel=1e-3)


def test_the_base_is_held_once_with_the_dequantised_weights_of_a_layer(tmp_path: Path) -> None:
    its_plan = sharded(tmp_path)
    assert its_plan.memory is not None
    assert its_plan.seat.room is not None
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    base = sum(its_plan.rank.base.values()) + its_plan.rank.gather + layer
    assert its_plan.seat.room == its_plan.memory - base


def test_a_micro_batch_takes_what_it_takes_alone_and_a_shorter_one_its_part(tmp_path: Path) -> None:
    its_plan = sharded(tmp_path)
    rank, seat = its_plan.rank, its_plan.seat
    assert seat.batch_tokens == its_plan.batches.tokens == 8192
    assert seat.batch == rank.activations + rank.rows + max(rank.logits, rank.workspace)
    assert seat.passing == max(rank.logits, rank.workspace)
    assert seat.batch_bytes(8192) == (seat.batch, seat.passing)
    assert seat.batch_bytes(1024) == pytest.approx((seat.batch / 8, seat.passing / 8), rel=1e-6)


def test_selective_checkpointing_is_full_in_an_engine(tmp_path: Path) -> None:
    full, selective = (
        sharded(tmp_path, distributed={"activation_checkpointing": mode}).seat.batch for mode in ("full", "selective")
    )
    assert full == selective


@pytest.mark.parametrize(
    ("step", "both"),
    [
        (STEP, 1.0),  # the wire hides the second one
        (replace(STEP, wire_seconds=0.0, step_seconds=0.8), 1.0),  # the weights are dequantised once
        (replace(STEP, compute_seconds=0.9, dequantise_seconds=0.1), 1.9),
        (replace(STEP, launch_seconds=1.0), 2.0),
    ],
)
def test_what_two_jobs_gain_in_a_step(step: Speed, both: float) -> None:
    assert sharing_gain(step, None) == pytest.approx(2 * step.step_seconds / both)


def test_short_jobs_gain_by_the_start_that_they_share() -> None:
    """Where each has its arithmetic to itself."""
    step = replace(STEP, compute_seconds=1.0, dequantise_seconds=0.0)
    assert sharing_gain(step, 0.0) == 2.0
    assert sharing_gain(step, START_SECONDS) == pytest.approx(4 / 3)
    assert sharing_gain(step, 1e6) == pytest.approx(1.0, abs=1e-4)


def test_the_gain_of_an_8b_falls_with_the_tokens_of_its_micro_batches(tmp_path: Path) -> None:
    """On a card that takes long to dequantise."""
    card, training = MACHINES["L4"], {"batch_size": 2, "max_steps": 50_000}
    short, long = (
        sharded(tmp_path, 2, card, training={**training, "max_length": tokens, "tokens_per_micro_batch": tokens}).seat.gain
        for tokens in (512, 8192)
    )
    assert short is not None
    assert long is not None
    assert short > WORTH_GAIN > long


def test_a_plan_in_json_has_its_seat(tmp_path: Path) -> None:
    its_plan = sharded(tmp_path)
    assert its_plan.as_dict()["seat"]["held"] == its_plan.seat.held
