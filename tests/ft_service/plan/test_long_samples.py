"""Plans of samples that fit only by tiles, or with layers' inputs in the host's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.plan.job import Plan
from ft_service.plan.long_samples import (
    LayerBytes,
    backward_by_tiles,
    beside_copies,
    copy_seconds,
)
from ft_service.plan.machines import GIB, MACHINES, Machine
from tests.support.bases import plan_of
from tests.support.plans import HOST, open_spec

H100 = MACHINES["H100"]
RTX_4090 = MACHINES["RTX-4090"]


def planned(
    folder: Path, machine: Machine, length: int, mode: str = "auto", ranks: int = 1
) -> Plan:
    """8B in NF4, r 16, samples of one length, each rank a copy."""
    spec = open_spec(
        folder,
        "8b",
        ranks,
        precision={"default": "nf4"},
        training={"max_length": length, "batch_size": ranks},
        lora={"r": 16},
        distributed={"replicate": ranks, "activation_checkpointing": "auto"},
    )
    distributed = spec.distributed.model_copy(update={"activation_checkpointing": mode})
    return plan_of(spec.model_copy(update={"distributed": distributed}), machine)


@pytest.mark.parametrize(
    ("machine", "length", "mode"),
    [
        (H100, 150_000, "full"),
        (H100, 180_000, "tiled"),
        (H100, 500_000, "offload"),
        (RTX_4090, 35_000, "full"),
        (RTX_4090, 45_000, "tiled"),
        (RTX_4090, 150_000, "offload"),
    ],
)
def test_each_way_is_taken_only_where_those_before_it_do_not_fit(
    machine: Machine, length: int, mode: str, tmp_path: Path
) -> None:
    plan = planned(tmp_path, machine, length)
    assert plan.fits
    [chosen] = [why for why in plan.chosen if why.startswith("distributed.activation_ch")]
    assert chosen.split()[1] == mode
    assert (plan.rank.host > 0) == (mode == "offload")
    if mode != "full":
        assert planned(tmp_path, machine, length, "full").fits is False


def test_what_offloading_pins_and_how_long_it_copies(tmp_path: Path) -> None:
    plan = planned(tmp_path, RTX_4090, 150_000, "offload")
    # 31 layers, 8,192 bytes a token, in blocks of 64 MiB
    blocks = -(-150_000 * 8192 // 2**26)
    assert plan.rank.host == 31 * blocks * 2**26
    assert plan.speed is not None
    assert plan.speed.copy_seconds == pytest.approx(plan.rank.host / (0.8 * 32e9))
    assert plan.speed.step_seconds == pytest.approx(
        plan.speed.compute_seconds + plan.speed.dequantise_seconds
    ), "beside what is computed"


@pytest.mark.parametrize(("copies", "expected"), [(1, 40), (20, 50), (35, 70)])
def test_copies_take_time_in_the_phase_in_which_they_take_longer(
    copies: int, expected: int
) -> None:
    assert beside_copies(40, copies) == expected


def test_a_host_without_the_memory_is_told(tmp_path: Path) -> None:
    """Of 8 ranks on a host, each of which needs 37 GiB for 150,000 tokens."""
    small, large = (replace(RTX_4090, host_memory=gib * GIB) for gib in (256, 512))
    plan = planned(tmp_path, small, 150_000, ranks=8)
    assert (plan.fits, plan.rank.host) == (False, 0)
    [told] = [warning for warning in plan.warnings if "offload" in warning]
    assert "pins 36.81 GiB" in told
    assert "25.60 GiB" in told
    given = planned(tmp_path, small, 150_000, "offload", ranks=8)
    assert given.memory is not None
    assert (given.fits, given.rank.total <= given.memory) == (False, True)
    assert planned(tmp_path, large, 150_000, ranks=8).fits


def test_a_processor_has_no_other_memory_to_put_inputs_into(tmp_path: Path) -> None:
    plan = planned(tmp_path, replace(HOST, memory=64 * GIB), 200_000)
    [chosen] = [why for why in plan.chosen if why.startswith("distributed.activation_ch")]
    assert chosen.split()[1] == "tiled"


LAYER = LayerBytes(
    kept=1000,
    inner=700,
    hidden=10,
    norm=20,
    q=30,
    kv=15,
    inner_needed=400,
    inner_product=100,
    outer_product=50,
)


@pytest.mark.parametrize(
    ("changes", "tokens", "of_attention", "dequantised", "most"),
    [
        ({}, 100, 0, 7, 100 * (300 + 20) + 100 * (700 + 400 + 20) + 7),
        ({"inner_product": 500}, 100, 0, 7, 100 * (300 + 20) + 100 * (700 + 500 + 20) + 7),
        # three tiles, as even as they can be
        ({}, 20_000, 0, 7, 20_000 * 320 + 6667 * 1120 + 7),
        ({}, 100, 10**6, 7, 100 * (300 - 20 + 2 * (30 + 15)) + 10**6),
        (
            {"inner": 990, "inner_needed": 0, "outer_product": 5000, "hidden": 1},
            8192 * 9,
            0,
            7,
            8192 * 9 * (3 * 1 + 20 + 30 + 2 * 15 + 5000) + 7,
        ),
    ],
)
def test_the_most_of_a_layer_s_backward_by_tiles(
    changes: dict[str, int], tokens: int, of_attention: int, dequantised: int, most: int
) -> None:
    """In a tile of its feed-forward, in attention, or in a product beside it."""
    layer = replace(LAYER, **changes)
    assert backward_by_tiles(layer, tokens, of_attention, dequantised) == most


def test_a_copy_takes_its_bytes_at_the_rate_that_a_link_reaches() -> None:
    assert copy_seconds(Machine("x", None, host_bandwidth=50.0), 80) == pytest.approx(2.0)
