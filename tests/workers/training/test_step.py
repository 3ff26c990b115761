"""Sharded and quantised against an unsharded reference of stock parts: loss, every adapter
gradient, what the collectives carried.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.distributed.tensor import DTensor

from ft_service.spec import JobSpec, WeightFormat
from tests.support.ranks import Cases, run_on_ranks
from tests.support.training.models import VOCABULARY, save_tiny_llama, spec_for
from tests.support.training.parity import (
    MIXED,
    Step,
    assert_parity,
    assert_parity_in_bf16,
    constructed,
    one_step,
    reference_steps,
    train_steps,
)
from workers.base.load import adapters
from workers.quant.rowwise import RowQuantized
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.training.step import Sums

FORMATS = {name: {"default": name} for name in get_args(WeightFormat)} | {"mixed": MIXED}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "nf4 on two": (2, {"default": "nf4"}, {}),
    "fewer rows than ranks": (3, {"default": "nf4"}, {"num_key_value_heads": 1, "head_dim": 2}),
    "nf4 with fp32 scales, on two": (2, {"default": "nf4_fp32"}, {}),
}
"""Beside those of tests/workers/test_parity_matrix.py, formats, one to four ranks and rows that
these do not divide, and those of tests/workers/ranks/test_sharding.py, tied embeddings.
"""


def job(base: Path, case: str) -> JobSpec:
    world, storage, changes = CASES[case]
    return spec_for(
        save_tiny_llama(base, **changes),
        ranks=world,
        precision={**storage, "compute": "fp32"},
        training={"per_device_train_batch_size": 2},
        lora={"r": 4},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Cases[list[Step]]:
    return Cases(train_steps, {case: job(tmp_path_factory.mktemp("base"), case) for case in CASES})


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_unsharded_reference(
    case: str, trained: Cases[list[Step]]
) -> None:
    spec, of_ranks = trained.of(case)
    truth = reference_steps(Path(spec.model.path), spec)
    for steps in of_ranks:
        assert_parity(steps, truth)


@pytest.mark.parametrize(
    "storage",
    [pytest.param(one, marks=() if one == "mixed" else pytest.mark.slow) for one in FORMATS],
)
def test_in_bf16_loss_and_gradients_are_as_near_as_those_of_stock_parts(
    storage: str, tmp_path: Path
) -> None:
    model = save_tiny_llama(tmp_path / "base")
    precision = {**FORMATS[storage], "compute": "bf16"}
    spec = spec_for(
        model,
        ranks=2,
        precision=precision,
        training={"per_device_train_batch_size": 8},
        lora={"r": 4},
    )
    stock, truth = (
        reference_steps(model, spec, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    for world, steps in [(1, 2), (2, 1)]:
        for found in run_on_ranks(train_steps, world, spec, steps):
            assert_parity_in_bf16(found, stock[:steps], truth[:steps])


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_one_gather_per_layer_and_direction_in_storage_format(world: int, tmp_path: Path) -> None:
    """NF4 weights put at most 0.58 bytes a parameter into a gather, padding rows included; the rest
    is adapters and norms.
    """
    changes = {
        "hidden_size": 128,
        "intermediate_size": 344,
        "vocab_size": VOCABULARY + 1,
    }  # rows that 3 does not divide
    model = save_tiny_llama(tmp_path / "base", **changes)
    spec = spec_for(
        model,
        ranks=world,
        precision={"default": "nf4"},
        training={"per_device_train_batch_size": 2},
        lora={"r": 4},
    )
    rounds = 2
    for step, layers, outer in run_on_ranks(step_and_sizes, world, spec):
        gathers = [(dtype, sent) for kind, dtype, sent, _ in step.collectives if kind == "gather"]
        of_layers = [sent for dtype, sent in gathers if dtype == "uint8"]
        assert len(of_layers) == 2 * len(layers) * rounds, (
            "forward and backward of every layer, in one buffer"
        )
        for layer in layers:
            assert of_layers.count(layer["nf4"] + layer["rest"]) == len(of_layers)
            assert layer["nf4"] * world <= 0.58 * layer["nf4_parameters"]
        of_others = [sent for dtype, sent in gathers if dtype == "bfloat16"]
        assert of_others == outer * rounds, (
            "embedding, then norm with head: once a micro-batch, never both at once"
        )
        reduces = [dtype for kind, dtype, _, _ in step.collectives if kind == "reduce"]
        assert reduces == ["float32"] * len(layers), "adapter gradients, once a step and layer"


def step_and_sizes(
    rank: int, world: int, spec: JobSpec
) -> tuple[Step, list[dict[str, int]], list[int]]:
    """One step, and what each layer and the other two groups put into a gather on this rank."""
    built = constructed(spec, world)
    # before: FSDP2 pads shards at the first.
    step = one_step(rank, world, spec, built, dict(adapters(built.peft_model)))
    layers = [
        bytes_in_gather(layer, world, COMPUTE_DTYPE[spec.precision.compute])
        for layer in built.layers
    ]
    base: Any = built.peft_model.get_base_model()
    return (
        step,
        layers,
        [
            plain_bytes([base.model.embed_tokens], world),
            plain_bytes([base.model.norm, base.lm_head], world),
        ],
    )


def bytes_in_gather(layer: torch.nn.Module, world: int, compute: torch.dtype) -> dict[str, int]:
    """Padding rows included: NF4 weights and the rest."""
    found = {"nf4": 0, "nf4_parameters": 0, "rest": 0}
    for parameter in layer.parameters():
        assert isinstance(parameter, DTensor)
        local: Any = parameter.to_local()
        if isinstance(local, RowQuantized):
            found["nf4"] += sum(part.nbytes for part in local.fsdp_pre_all_gather(None)[0])
            found["nf4_parameters"] += parameter.numel()
        else:
            row = math.prod(parameter.shape[1:])
            found["rest"] += -(-parameter.shape[0] // world) * row * compute.itemsize
    return found


def plain_bytes(modules: list[torch.nn.Module], world: int) -> int:
    """Of bf16 weights, padding rows included."""
    shapes = [parameter.shape for module in modules for parameter in module.parameters()]
    return sum(-(-shape[0] // world) * math.prod(shape[1:]) * 2 for shape in shapes)


@pytest.mark.parametrize(
    ("loss", "correct", "targets", "mean", "accuracy", "impossible"),
    [
        (6.0, 1, 4, 1.5, 0.25, False),
        (0.5, 1, 1, 0.5, 1.0, False),
        (0.0, 3, 4, 0.0, 0.75, True),
        (0.0, 4, 4, 0.0, 1.0, False),
        (0.0, 0, 0, 0.0, 0.0, False),
    ],
)
def test_a_loss_and_an_accuracy_are_means_over_the_targets(
    loss: float, correct: int, targets: int, mean: float, accuracy: float, impossible: bool
) -> None:
    sums = Sums.read(torch.tensor([loss, correct], dtype=torch.float64), targets)
    assert (sums.loss, sums.correct, sums.targets) == (loss, correct, targets)
    assert (sums.mean_loss, sums.accuracy, sums.is_impossible) == (mean, accuracy, impossible)
    assert sums.more is None
