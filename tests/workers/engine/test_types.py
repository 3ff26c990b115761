"""Every causal type as the base of an engine: two jobs on it compute what they compute alone, bit
for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.causal_types import TYPES, save_type
from tests.support.training.lanes import Together, assert_same, trained_alone
from tests.support.training.models import spec_for
from tests.support.training.tested_types import TESTED

QUICK = ("modernbert-decoder",)
"""Its head holds a linear layer that is a group of its own, and has an adapter."""
GATED_ATTENTION = ("beam",)
"""Types with experts whose attention has a gate_proj as well: PEFT takes that for an expert's, and
has no dropout for it.
"""


def both_ways(rank: int, world: int, specs: list[JobSpec]) -> tuple[Any, Any]:
    alone = [trained_alone(number, spec, rank, world) for number, spec in enumerate(specs)]
    return alone, Together(specs, rank, world).train(range(len(specs)))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in sorted(TESTED & set(TYPES))
    ],
)
def test_a_type_is_trained_as_alone(kind: str, tmp_path: Path) -> None:
    save_type(kind, tmp_path)
    options: dict[str, Any] = {
        "precision": {"default": "bf16", "compute": "fp32"},
        "training": {"per_device_train_batch_size": 2},
        "distributed": {"activation_checkpointing": "none"},
    }
    dropout = 0.0 if kind in GATED_ATTENTION else 0.1
    specs = [
        spec_for(tmp_path, lora=lora, **options)
        for lora in ({"r": 4, "lora_dropout": dropout}, {"r": 8})
    ]
    ((alone, together),) = run_on_ranks(both_ways, 1, specs)
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)
