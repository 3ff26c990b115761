"""Whole models whose attention sees the keys that an indexer chooses: trained packed as padded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.causal_types import save_type
from tests.support.training.models import spec_for
from tests.support.training.parity import (
    Step,
    assert_parity,
    batches_of,
    constructed,
    full,
    samples,
)
from workers.base.load import adapters
from workers.data import batches
from workers.layers.dropout import key_of
from workers.patches import indexed_attention
from workers.training.step import Sums, forward_backward

KINDS = ("deepseek_v32", "glm_moe_dsa")


def one_step(rank: int, world: int, spec: JobSpec) -> Step:
    """With the masks of dropout, packed rows filled up, and an indexer's scores made for a few
    queries at a time.
    """
    batches.filled_row = lambda tokens: tokens + 3  # in a process of its own
    indexed_attention.SCORES_AT_ONCE = 2 * 24 * 3  # in a process of its own
    data = samples()
    built = constructed(spec, world)
    own = batches_of(
        data, rank, world, spec, [key_of("sample", spec.seed, 0, i) for i in range(len(data))]
    )
    targets = sum(t.target_count for t in data)
    sums = Sums.read(forward_backward(built.peft_model, own, targets, world), targets)
    return Step(sums.mean_loss, {name: full(p.grad) for name, p in adapters(built.peft_model)})


def steps(rank: int, world: int, specs: Mapping[str, JobSpec]) -> dict[str, Step]:
    return {name: one_step(rank, world, spec) for name, spec in specs.items()}


def spec_of(base: Path, ranks: int, packing: bool, **options: Any) -> JobSpec:
    return spec_for(
        base,
        ranks=ranks,
        precision={"default": "nf4", "compute": "fp32"},
        lora={"r": 4, "lora_dropout": 0.25},
        training={
            "packing": packing,
            "per_device_train_batch_size": 7,
            "tokens_per_micro_batch": 80,
        },
        distributed=options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_same_packed_and_padded(kind: str, tmp_path: Path) -> None:
    """On one rank and on two, with dropout, and with activations computed again."""
    base = tmp_path / "base"
    assert save_type(kind, base)
    of_one = {
        "padded": spec_of(base, 1, packing=False),
        "packed": spec_of(base, 1, packing=True),
        "computed again": spec_of(base, 1, packing=True, activation_checkpointing="full"),
        "products kept": spec_of(base, 1, packing=True, activation_checkpointing="selective"),
    }
    (found,) = run_on_ranks(steps, 1, of_one)
    padded = found.pop("padded")
    two = run_on_ranks(steps, 2, {"packed": spec_of(base, 2, packing=True)})
    assert all(torch.count_nonzero(grad) for grad in padded.grads.values())
    for step in found.values():
        assert_parity([step], [padded], loss=1e-6, gradients=1e-6)
    for on_rank in two:
        assert_parity([on_rank["packed"]], [padded], loss=1e-6, gradients=1e-6)
