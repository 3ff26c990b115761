"""DoRA on sharded quantised rows, next to PEFT's own on the whole dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.errors import SpecError
from ft_service.spec import JobSpec, parse_request
from tests.support.ranks import run_on_ranks
from tests.support.training.models import reference, save_tiny_llama, spec_for
from tests.support.training.parity import (
    CPU,
    MIXED,
    assert_parity,
    full,
    reference_steps,
    relative_error,
    train_steps,
)
from workers.attempt.prepared_model import construct
from workers.base.load import adapters, plain_name
from workers.ranks.sharding import make_mesh


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"))


WHOLE = {"ignored": [r".*(q|o|down)_proj\.weight"]}
"""Some weights of every format, which no rank shares with another."""


def dora(
    base: Path, world: int, compute: str = "fp32", distributed: dict[str, Any] | None = None
) -> JobSpec:
    lora = {"r": 5, "use_dora": True}
    precision = {**MIXED, "compute": compute}
    return spec_for(
        base, ranks=world, lora=lora, precision=precision, distributed=distributed or {}
    )


def magnitudes(rank: int, world: int, spec: JobSpec) -> dict[str, torch.Tensor]:
    model = construct(spec, make_mesh("cpu", world, 1), CPU, warn=print).peft_model
    return {
        name: full(parameter.detach()) for name, parameter in adapters(model) if "magnitude" in name
    }


@pytest.mark.parametrize(
    ("world", "distributed"),
    [pytest.param(1, {}, marks=pytest.mark.slow), (2, WHOLE), (3, {})],
    ids=["1", "2, some whole", "3"],
)
def test_loss_and_every_gradient_are_those_of_peft(
    world: int, distributed: dict[str, Any], base: Path
) -> None:
    truth = reference_steps(base, dora(base, 1))
    assert sum("lora_magnitude_vector" in name for name in truth[0].grads) * 3 == len(
        truth[0].grads
    )
    for ours in run_on_ranks(train_steps, world, dora(base, world, distributed=distributed)):
        assert_parity(ours, truth)


def test_magnitudes_begin_as_the_norms_of_the_rows_that_each_rank_holds(base: Path) -> None:
    model: Any = reference(base, dora(base, 1))
    weights = {
        plain_name(name): module.base_layer.weight
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    for found in run_on_ranks(magnitudes, 3, dora(base, 3, distributed=WHOLE)):
        assert len(found) == len(weights)
        for name, values in found.items():
            norms = weights[name.removesuffix(".lora_magnitude_vector.default.weight")].norm(dim=1)
            assert relative_error(values, norms) < 1e-6, name
    (rounded,) = run_on_ranks(magnitudes, 1, dora(base, 1, "bf16"))
    assert all(torch.equal(own, own.bfloat16().float()) for own in rounded.values()), (
        "as the layer computes: ratio 1"
    )


def test_what_peft_has_not_with_dora_is_refused_by_name() -> None:
    body = {"model": "tiny", "training_file": "file"}
    for other, value in (("lora_dropout", 0.1), ("target_parameters", ["mlp.experts.down_proj"])):
        with pytest.raises(SpecError, match=f"lora.use_dora with lora.{other}"):
            parse_request({**body, "lora": {"use_dora": True, other: value}})
