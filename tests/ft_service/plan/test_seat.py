from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.engines.sharing import WORTH_GAIN
from ft_service.plan.job import Plan
from ft_service.plan.machines import MACHINES, Machine
from ft_service.plan.memory import RankBytes
from ft_service.plan.seat import (
    SEAT_SECONDS,
    START_SECONDS,
    engine_seconds,
    lanes_of,
    seat_size,
    seconds_alone,
    sharing_gain,
)
from ft_service.plan.speed import Speed
from ft_service.rundir.engine import SeatSize
from tests.support.plans import H100, made_base, made_job, plan_8b

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


def test_a_micro_batch_takes_what_it_takes_alone_and_a_shorter_one_its_part(tmp_path: Path) -> None:
    its_plan = sharded(tmp_path)
    rank = its_plan.rank
    seat = its_plan.seat
    assert seat.batch_tokens == its_plan.batches.tokens == 8192
    assert seat.batch == rank.activations + rank.rows + max(rank.logits, rank.workspace)
    assert seat.passing == max(rank.logits, rank.workspace)
    assert seat.batch_bytes(8192) == (seat.batch, seat.passing)
    assert seat.batch_bytes(1024) == pytest.approx((seat.batch / 8, seat.passing / 8), rel=1e-6)


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


ALONE = RankBytes(
    base={"nf4": 1000, "bf16": 200},
    adapters=30,
    gradients=40,
    optimizer=50,
    gather=600,
    accumulation=8,
    activations=1,
    activations_by_mode={"none": 90, "full": 10, "tiled": 1},
    workspace=1,
    workspace_by_mode={"none": 12, "full": 20, "tiled": 1},
    host=0,
    host_by_mode={"none": 0, "full": 0, "tiled": 0},
    rows=14,
    logits=16,
    offloaded=False,
    heap_factor=1.5,
)
ADAPTERS = 3 * 4 * (2 * (128 + 64) + 2 * (64 + 64) + 3 * (512 + 64))
"""Numbers of those of `made_base` with r = 4."""
DEQUANTISED = 2 * (2 * 128 * 64 + 2 * 64 * 64 + 3 * 512 * 64)
"""Bytes of a layer's weights in the compute dtype."""


@pytest.mark.parametrize(
    ("ranks", "mode", "precision", "outside", "kept", "passing", "layer"),
    [
        (1, "none", {"default": "nf4"}, 8, 90, 16, DEQUANTISED),
        (1, "tiled", {"default": "bf16"}, 8, 10, 20, 0),
        (2, "full", {"default": "fp8"}, (2 + 4) * ADAPTERS, 10, 20, DEQUANTISED),
        (
            2,
            "none",
            {"default": "bf16", "compute": "fp32", "overrides": {r".*\.1\..*q_proj": "nf4"}},
            (4 + 4) * ADAPTERS,
            90,
            16,
            4 * 128 * 64,
        ),
    ],
)
def test_all_bytes_of_a_seat(
    ranks: int,
    mode: str,
    precision: dict[str, Any],
    outside: int,
    kept: int,
    passing: int,
    layer: int,
) -> None:
    """Of what a rank has alone, half as much again for gaps, and the memory of a GPU."""
    precision = {"compute": "bf16", **precision}
    distributed = {"activation_checkpointing": mode}
    job = made_job(made_base(), ranks, precision=precision, distributed=distributed, lora={"r": 4})
    seat = SeatSize(
        held=int(1.5 * (30 + 40 + 50 + outside)),
        batch=int(1.5 * (kept + 14 + passing)),
        batch_tokens=77,
        room=94_000_000 - int(1.5 * (1000 + 200 + 600 + layer)),
        gain=None,
        passing=int(1.5 * passing),
    )
    assert seat_size(job, Machine("x", 100_000_000), ALONE, 77) == seat
    assert seat_size(job, Machine("x", None), ALONE, 77) == replace(seat, room=None)


@pytest.mark.parametrize(
    ("seats", "tokens", "room", "budget", "lanes"),
    [
        # 3 x 10 are held, 200 pass and 800 stay of a micro-batch
        (3, 8192, 30 + 200 + 2 * 800, 16_384, 2),
        (3, 8192, 30 + 200 + 2 * 800 - 1, 16_384, 1),
        (3, 4096, 30 + 100 + 3 * 400, "auto", 2),
        (3, 2048, 30 + 50 + 3 * 200, "auto", 3),
        (3, 2048, 30 + 50 + 3 * 200 - 1, "auto", 2),
        (1, 2048, None, "auto", 1),
        (5, 2048, None, 10_000, 4),
        (5, 2048, None, 2047, 1),
    ],
)
def test_one_byte_less_is_a_lane_less(
    seats: int, tokens: int, room: int | None, budget: int | str, lanes: int
) -> None:
    training = {"tokens_per_micro_batch": budget}
    spec = made_job(made_base(), training=training).spec
    seat = SeatSize(held=10, batch=1000, batch_tokens=8192, room=room, gain=None, passing=200)
    assert lanes_of([seat] * seats, tokens, spec) == lanes


def test_the_largest_of_different_seats_decide() -> None:
    spec = made_job(made_base(), training={"tokens_per_micro_batch": 80}).spec
    one = SeatSize(held=10, batch=50, batch_tokens=10, room=140, gain=None, passing=40)
    other = SeatSize(held=20, batch=30, batch_tokens=10, room=0, gain=None, passing=0)
    assert lanes_of([one, other, other], 10, spec) == (140 - 50 - 40) // 30
    free = SeatSize(held=0, batch=0, batch_tokens=10, room=3, gain=None)
    assert lanes_of([free] * 4, 10, spec) == 3


def test_jobs_of_different_steps_wait_for_the_slowest_of_each_kind() -> None:
    """Together 10 steps, then 10 of the second alone, each with its start in the ranks' time."""
    quick = Speed(1.0, 0.5, 0.1, 0.3, 0.45, 0.2)
    slow = Speed(1.0, 1.0, 0.2, 0.6, 0.85, 0.3)
    found = engine_seconds([(slow, 20.0), (quick, 5.0)], 2)
    assert found == pytest.approx(10.0 + 2 * 2.7 + 10 * (0.1 + 0.2 + 0.6) + 10 * 0.85)
    wired = engine_seconds([(slow, 20.0), (replace(quick, wire_seconds=2.0), 5.0)], 2)
    assert wired == pytest.approx(10.0 + 2 * 2.7 + 10 * 2.0 + 10 * 0.85)
    launched = [(replace(one, launch_seconds=0.7), 10 * one.step_seconds) for one in (quick, slow)]
    assert engine_seconds(launched, 2) == pytest.approx(10.0 + 2 * 2.7 + 10 * 1.4)
    assert engine_seconds([], 2) == START_SECONDS
    assert seconds_alone(3.0) == pytest.approx(10.0 + 2.7 + 3.0)
