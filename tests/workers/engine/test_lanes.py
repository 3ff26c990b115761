"""Jobs on one base beside the same jobs alone: bit for bit, and with the gathers of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.lanes import Together, assert_same, trained_alone, work_of
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import MIXED, constructed
from workers.engine.lanes import Lane
from workers.training.step import evaluate

LORA: list[dict[str, Any]] = [
    {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    {"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 32},
    {"r": 16, "target_modules": ["gate_proj", "down_proj", "o_proj"], "use_rslora": True},
    {"r": 32, "target_modules": "all-linear"},
]

POISONED = 1
"""The job whose adapters are not numbers, where one is."""


def specs_of(model: Path, world: int, storage: dict[str, Any], checkpointing: str) -> list[JobSpec]:
    distributed = {"activation_checkpointing": checkpointing}
    precision = {**storage, "compute": "bf16"}
    options: dict[str, Any] = {"precision": precision, "distributed": distributed}
    return [
        spec_for(
            model, ranks=world, training={"per_device_train_batch_size": 2}, lora=lora, **options
        )
        for lora in LORA
    ]


def alone_and_together(rank: int, world: int, specs: list[JobSpec]) -> tuple[Any, Any, Any]:
    """Each job by itself and all of them, and all in another order, one of them of NaNs."""
    alone = [trained_alone(number, spec, rank, world) for number, spec in enumerate(specs)]
    together = Together(specs, rank, world).train(range(len(specs)))
    poisoned = Together(specs, rank, world, poisoned=POISONED).train([3, 1, 2, 0])
    return alone, together, poisoned


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny")


@pytest.mark.parametrize(
    ("world", "storage", "checkpointing"),
    [
        pytest.param(1, MIXED, "full", marks=pytest.mark.slow),
        (2, MIXED, "full"),
        pytest.param(2, {"default": "bf16"}, "none", marks=pytest.mark.slow),
        pytest.param(2, {"default": "fp8"}, "full", marks=pytest.mark.slow),
        pytest.param(2, {"default": "nf4_fp32"}, "none", marks=pytest.mark.slow),
    ],
)
def test_every_job_computes_the_bits_that_it_computes_alone(
    model: Path, world: int, storage: dict[str, Any], checkpointing: str
) -> None:
    """In any order, and beside one of NaNs."""
    specs = specs_of(model, world, storage, checkpointing)
    for alone, together, poisoned in run_on_ranks(alone_and_together, world, specs):
        for number, expected in enumerate(alone):
            assert_same(together[number], expected)
            if number != POISONED:
                assert_same(poisoned[number], expected)
        assert all(gradient.isnan().any() for gradient in poisoned[POISONED][1].values())


def rounds_of(rank: int, world: int, specs: list[JobSpec]) -> list[tuple[int, int, int]]:
    found = []
    for order in ([0], [0, 1, 3]):
        together = Together(specs, rank, world)
        together.train(order)
        found.append(together.rounds[0])
    return found


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_neither_gathers_nor_dequantised_weights_grow_with_the_jobs(
    model: Path, checkpointing: str
) -> None:
    specs = specs_of(model, 2, {"default": "nf4"}, checkpointing)
    (one, three), _ = run_on_ranks(rounds_of, 2, specs)
    assert [lanes for lanes, _, _ in (one, three)] == [1, 3]
    assert one[1] == three[1] > 0
    assert 0 < three[2] <= one[2]


def validated(
    rank: int, world: int, specs: list[JobSpec]
) -> tuple[list[float], list[float], list[float]]:
    built = constructed(specs[3], world)
    built.peft_model.eval()
    batches, _, _ = work_of(3, specs[3], rank, world)
    alone = evaluate(built.peft_model, batches, world).tolist()
    together = Together(specs, rank, world)
    seat = together.seats[3]
    with together.base.alone(Lane(seat.linears)):
        found = evaluate(seat.model, batches, world).tolist()
    together.seats[0].model.eval()
    with together.base.alone(Lane(together.seats[0].linears)):
        other = evaluate(together.seats[0].model, batches, world).tolist()
    return alone, found, other


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_job_validates_while_the_others_wait(model: Path, world: int) -> None:
    specs = specs_of(model, world, {"default": "nf4"}, "none")
    for alone, found, other in run_on_ranks(validated, world, specs):
        assert found == alone
        assert other != alone
