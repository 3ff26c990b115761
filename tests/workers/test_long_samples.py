"""Feed-forwards by tiles and offloaded inputs, in the worker's own steps on ranks: against the same
steps with full checkpointing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.spec import JobSpec
from tests.support.ranks import Cases, often_and_slow
from tests.support.training.late_copies import LateCopies, on_small_scale
from tests.support.training.models import save_tiny, spec_for
from tests.support.training.parity import MIXED, Step, batches_of, constructed, full, samples
from workers.base.load import adapters
from workers.training.step import Sums, forward_backward

TILE = 8
LAYERS = 3
WHOLE = ["embed_tokens", "lm_head"]
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "nf4, fp8 and bf16, two ranks": (2, "llama", {"precision": MIXED}),
    "whole on each rank, dropout and noise": (
        1,
        "llama",
        {"lora": {"lora_dropout": 0.2}, "training": {"neftune_noise_alpha": 5.0}},
    ),
    "experts": (1, "qwen3_moe", {}),
    "a norm behind the feed-forward": (1, "gemma2", {}),
    "modules trained whole, padded, two ranks": (
        2,
        "llama",
        {"lora": {"modules_to_save": WHOLE}, "training": {"packing": False}},
    ),
    "dora, three ranks": (3, "llama", {"lora": {"use_dora": True}, "precision": MIXED}),
    "experts, two ranks": (2, "qwen3_moe", {"precision": {"default": "nf4"}}),
    "copies of two ranks": (4, "llama", {"precision": MIXED, "distributed": {"replicate": 2}}),
    "kept gathered": (2, "llama", {"distributed": {"keep_unsharded": True}}),
    "one group": (2, "llama", {"distributed": {"wrap": "none"}}),
    "bf16": (1, "llama", {"precision": {"compute": "bf16"}}),
}
SLOW = CASES.keys() - {
    "nf4, fp8 and bf16, two ranks",
    "whole on each rank, dropout and noise",
    "a norm behind the feed-forward",
}


def spec_of(bases: Path, case: str) -> JobSpec:
    world, family, given = CASES[case]
    options: dict[str, Any] = {name: dict(values) for name, values in given.items()}
    options.setdefault("lora", {}).setdefault("r", 4)
    options.setdefault("precision", {}).setdefault("compute", "fp32")
    options.setdefault("training", {})["per_device_train_batch_size"] = 3
    options.setdefault("distributed", {})["activation_checkpointing"] = "full"
    base = bases / family
    if not base.exists():
        save_tiny(family, base, num_hidden_layers=LAYERS)
    return spec_for(base, ranks=world, **options)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Cases[dict[str, Step]]:
    bases = tmp_path_factory.mktemp("bases")
    specs = {case: spec_of(bases, case) for case in CASES}
    return Cases(steps_by_mode, specs, SLOW)


def steps_by_mode(rank: int, world: int, spec: JobSpec) -> dict[str, Step]:
    """A step in each mode; and "offload" without tiles, as "untiled"."""
    found: dict[str, Step] = {}
    for name, mode, tile in (
        ("full", "full", TILE),
        ("tiled", "tiled", TILE),
        ("offload", "offload", TILE),
        ("untiled", "offload", 10_000),
    ):
        with on_small_scale(tile) as copies:
            found[name] = step(rank, world, in_mode(spec, mode))
            if mode == "offload":
                assert_used(copies)
    return found


def in_mode(spec: JobSpec, mode: str) -> JobSpec:
    # `offload` is refused where there is no GPU: given to the model, past the spec's checks.
    distributed = spec.distributed.model_copy(update={"activation_checkpointing": mode})
    return spec.model_copy(update={"distributed": distributed})


def assert_used(copies: LateCopies) -> None:
    assert copies.asked > 0
    assert copies.asked % (2 * (LAYERS - 1)) == 0, "each input but the last went, and came back"
    assert copies.most == 1, "the device holds one beside that of the layer that computes"


def step(rank: int, world: int, spec: JobSpec) -> Step:
    built = constructed(spec, world)
    data = samples(longest=30)
    keys = list(range(len(data))) if spec.lora.lora_dropout else None
    if spec.training.neftune_noise_alpha is not None:
        keys = list(range(len(data)))
    targets = sum(own.target_count for own in data)
    batches = batches_of(data, rank, world, spec, keys)
    sums = forward_backward(built.peft_model, batches, targets, world)
    trained = dict(adapters(built.peft_model))
    return Step(
        Sums.read(sums, targets).loss, {name: full(own.grad) for name, own in trained.items()}
    )


@pytest.mark.parametrize("case", often_and_slow(CASES, SLOW))
def test_offloaded_inputs_change_no_bit_and_tiles_next_to_nothing(
    case: str, steps: Cases[dict[str, Step]]
) -> None:
    spec, by_rank = steps.of(case)
    bound = 1e-6 if spec.precision.compute == "fp32" else 2e-2
    for found in by_rank:
        whole, tiled, offloaded, untiled = (
            found[name] for name in ("full", "tiled", "offload", "untiled")
        )
        assert whole.grads.keys() == tiled.grads.keys()
        for one, other in ((whole, untiled), (tiled, offloaded)):
            assert one.loss == other.loss
            for name, grad in one.grads.items():
                assert torch.equal(grad, other.grads[name]), name
        assert tiled.loss == pytest.approx(whole.loss, rel=bound)
        for name, grad in whole.grads.items():
            assert (tiled.grads[name] - grad).norm() <= bound * grad.norm(), name
