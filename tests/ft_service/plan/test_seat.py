from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.engines.sharing import WORTH_GAIN
from ft_service.plan.job import Plan
from ft_service.plan.machines import MACHINES, Machine
from ft_service.plan.seat import SEAT_SECONDS, START_SECONDS, engine_seconds, lanes_of, sharing_gain
from ft_service.plan.speed import Speed
from ft_service.rundir.engine import SeatSize
from tests.support.plans import H100, open_spec, plan_8b

QLORA: dict[str, Any] = {
    "precision": {"default": "nf4"},
    "training": {
        "batch_size": 8,
        "per_device_train_batch_size": 4,
        "max_length": 2048,
        "tokens_per_micro_batch": 8192,
    },
}
STEP = Speed(
    1000.0, 1.0, compute_seconds=0.2, dequantise_seconds=0.6, wire_seconds=1.0, launch_seconds=0.1
)


def sharded(tmp_path: Path, ranks: int = 2, machine: Machine = H100, **options: Any) -> Plan:
    options = {**QLORA, **options}
    options["distributed"] = {
        "replicate": 1,
        "activation_checkpointing": "full",
        **options.get("distributed", {}),
    }
    return plan_8b(tmp_path, ranks, machine, **options)


def test_a_seat_holds_the_adapters_sharded_whole_and_with_the_sums_of_their_gradients(
    tmp_path: Path,
) -> None:
    its_plan = sharded(tmp_path)
    adapters = its_plan.adapter_parameters
    masters_gradients_and_moments = 4 * 4 * adapters // 2
    whole_and_sums = (2 + 4) * adapters
    assert its_plan.seat.held == pytest.approx(
        masters_gradients_and_moments + whole_and_sums, rel=1e-3
    )


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
    rank = its_plan.rank
    seat = its_plan.seat
    assert seat.batch_tokens == its_plan.batches.tokens == 8192
    assert seat.batch == rank.activations + rank.rows + max(rank.logits, rank.workspace)
    assert seat.passing == max(rank.logits, rank.workspace)
    assert seat.batch_bytes(8192) == (seat.batch, seat.passing)
    assert seat.batch_bytes(1024) == pytest.approx((seat.batch / 8, seat.passing / 8), rel=1e-6)


def test_selective_checkpointing_is_full_in_an_engine(tmp_path: Path) -> None:
    full, selective = (
        sharded(tmp_path, distributed={"activation_checkpointing": mode}).seat.batch
        for mode in ("full", "selective")
    )
    assert full == selective


@pytest.mark.parametrize(
    ("step", "both"),
    [
        (STEP, 1.0),  # the wire hides the second one
        (
            replace(STEP, wire_seconds=0.0, step_seconds=0.8),
            1.0,
        ),  # the weights are dequantised once
        (replace(STEP, compute_seconds=0.9, dequantise_seconds=0.1), 1.9),
        (replace(STEP, launch_seconds=1.0), 2.0),
    ],
)
def test_what_two_jobs_gain_in_a_step(step: Speed, both: float) -> None:
    assert sharing_gain(step, None, lanes=2) == pytest.approx(2 * step.step_seconds / both)
    assert sharing_gain(step, None, lanes=1) == pytest.approx(
        step.step_seconds
        / max(
            step.compute_seconds + step.dequantise_seconds, step.wire_seconds, step.launch_seconds
        )  # each in its own round
    )


def test_short_jobs_gain_by_the_start_that_they_share() -> None:
    """Where each has its arithmetic to itself."""
    step = replace(STEP, compute_seconds=1.0, dequantise_seconds=0.0)
    start = START_SECONDS
    own = SEAT_SECONDS
    assert sharing_gain(step, 0.0, lanes=2) == pytest.approx(2 * (start + own) / (start + 2 * own))
    assert sharing_gain(step, 100.0, lanes=2) == pytest.approx(
        2 * (start + own + 100) / (start + 2 * own + 200)
    )
    assert sharing_gain(step, 1e6, lanes=2) == pytest.approx(1.0, abs=1e-4)


def test_the_seconds_of_an_engine_are_those_of_its_rounds() -> None:
    """Of jobs that take 10 and 30 steps of 0.8 s alone, in which 0.6 s go to what a round does
    once.
    """
    step = replace(STEP, wire_seconds=0.0, step_seconds=0.8)
    trainings = [(step, 24.0), (step, 8.0), (step, 8.0)]
    together, by_two, in_turn = (
        engine_seconds(trainings, lanes) - START_SECONDS - 3 * SEAT_SECONDS for lanes in (3, 2, 1)
    )
    assert together == pytest.approx(10 * (3 * 0.2 + 0.6) + 20 * 0.8)
    assert by_two == pytest.approx(10 * (3 * 0.2 + 2 * 0.6) + 20 * 0.8)
    assert in_turn == pytest.approx(24 + 8 + 8)


def test_a_round_takes_what_fits_its_tokens_and_its_memory(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", training={"tokens_per_micro_batch": 8192})
    seat = SeatSize(held=10, batch=1000, batch_tokens=8192, room=None, gain=None, passing=200)
    assert [lanes_of([seat] * 8, tokens, spec) for tokens in (100, 1024, 3000, 8192)] == [
        8,
        8,
        2,
        1,
    ]
    assert [
        lanes_of([replace(seat, room=room)] * 4, 1024, spec) for room in (10_000, 40 + 25 + 300, 0)
    ] == [4, 3, 1]


def test_the_gain_of_an_8b_falls_with_the_tokens_of_its_micro_batches(tmp_path: Path) -> None:
    """On a card that takes long to dequantise."""
    card = MACHINES["L4"]
    training = {"batch_size": 2, "max_steps": 50_000, "tokens_per_micro_batch": 16_384}
    short, long, alone = (
        sharded(tmp_path, 2, card, training={**training, "max_length": tokens, **more}).seat.gain
        for tokens, more in ((512, {}), (8192, {}), (512, {"tokens_per_micro_batch": 512}))
    )
    assert short is not None
    assert long is not None
    assert short > WORTH_GAIN > long
    assert alone == pytest.approx(1.0, abs=1e-3), "no round takes two of its micro-batches"


def test_a_plan_in_json_has_its_seat(tmp_path: Path) -> None:
    its_plan = sharded(tmp_path)
    assert its_plan.as_dict()["seat"]["held"] == its_plan.seat.held
