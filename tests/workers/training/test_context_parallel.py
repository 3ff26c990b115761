"""Rows that several ranks share against the same rows on one rank each: losses, gradients,
preferences, and whole jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import OF_EXPERTS, VOCABULARY, save_tiny, spec_for
from tests.support.training.parity import CPU, constructed, full, relative_error
from workers.base.load import adapters
from workers.data.micro_batches import MicroBatchLimits
from workers.ranks.context_group import ContextGroup
from workers.ranks.sharding import Gradients
from workers.training.objective import RankShare, Supervised
from workers.training.step import evaluate, forward_backward

EXACT = {"default": "bf16", "compute": "fp32"}
BOUND = 1e-6
"""Of losses, relative; of gradients as well, of all of a model's together."""


def of_lengths(*lengths: int) -> TokenSet:
    generator = np.random.default_rng(1)
    return TokenSet.of(
        Tokens(
            generator.integers(0, VOCABULARY, length).astype(np.int32),
            generator.random(length) < 0.7,
        )
        for length in lengths
    )


SAMPLES = of_lengths(21, 1, 13, 2, 17, 30, 5)
"""Rows of them, of at most 60 tokens, are cut within samples, and padded."""


def step(
    model: nn.Module, share: RankShare, *, random: bool
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Sums of the loss in training and validation, and all gradients, whole."""
    objective = Supervised(SAMPLES)
    items = range(len(objective))
    targets = objective.divisor(items)
    key = (lambda sample: 1000 + sample) if random else None
    sums = forward_backward(
        model,
        share.batches(objective, items, key),
        targets,
        share.world,
        gradients=Gradients(model, share.world),
    )
    trained = dict(adapters(model))
    grads = {name: full(parameter.grad) for name, parameter in trained.items()}
    for parameter in trained.values():
        parameter.grad = None
    model.eval()
    valid = evaluate(model, share.batches(objective, items), share.world)
    model.train()
    return float(sums[0]), float(valid[0]), grads


def errors(
    rank: int, world: int, specs: Mapping[str, JobSpec], ranks: int
) -> dict[str, tuple[float, float, float]]:
    """Of every base, packed and padded: relative errors of training loss, validation loss and
    gradient with `ranks` ranks a row.
    """
    context = ContextGroup.made(ranks)
    found = {}
    for name, spec in specs.items():
        model = constructed(spec, world).peft_model
        random = spec.lora.lora_dropout > 0
        for packed in (True, False):
            limits = MicroBatchLimits(60 // ranks, None, packed)
            alone, shared = (
                step(model, RankShare(rank, world, CPU, limits, own), random=random)
                for own in (None, context)
            )
            gradients = (
                torch.cat([grads[key].flatten() for key in alone[2]])
                for grads in (shared[2], alone[2])
            )
            found[f"{name} {'packed' if packed else 'padded'}"] = (
                abs(shared[0] / alone[0] - 1),
                abs(shared[1] / alone[1] - 1),
                relative_error(*gradients),
            )
    return found


def specs_of(
    folder: Path, families: Mapping[str, dict[str, Any]], ranks: int
) -> dict[str, JobSpec]:
    found = {}
    for name, options in families.items():
        family = name.partition("-")[0]
        base = save_tiny(family, folder / name, **options.pop("config", {}))
        lora = {"r": 3, "target_modules": OF_EXPERTS.get(family, "all-linear")}
        given = {"precision": EXACT, **options, "lora": {**lora, **options.get("lora", {})}}
        found[name] = spec_for(base, ranks=ranks, **given)
    return found


NOISY = {"lora": {"lora_dropout": 0.2}, "training": {"neftune_noise_alpha": 5.0}}
OFTEN: dict[str, dict[str, Any]] = {"llama": NOISY, "gpt_oss": {}, "llama4_text": {}}


def test_two_ranks_a_sample_train_as_one_does(tmp_path: Path) -> None:
    """Windows, sinks, chunks, temperatures by position, dropout and noise."""
    specs = specs_of(tmp_path, OFTEN, 2)
    found = run_on_ranks(errors, 2, specs, 2)[0]
    print(found)
    assert {case: error for case, error in found.items() if not max(error) <= BOUND} == {}
