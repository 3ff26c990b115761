"""Samples, and a step of a rank, for tests of rows that ranks share."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from tests.support.training.models import VOCABULARY
from tests.support.training.parity import full
from workers.base.load import adapters
from workers.ranks.sharding import Gradients
from workers.training.objective import Objective, RankShare, loss_with_baseline
from workers.training.step import evaluate, forward_backward


def of_lengths(*lengths: int) -> TokenSet:
    generator = np.random.default_rng(1)
    return TokenSet.of(
        Tokens(
            generator.integers(0, VOCABULARY, length).astype(np.int32),
            (np.arange(length) > 2) & (generator.random(length) < 0.7) | (np.arange(length) == 3),
            label=number % 3 > 0,
        )
        for number, length in enumerate(lengths)
    )


def step(
    model: nn.Module, objective: Objective, share: RankShare, *, random: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums in training and validation, and all gradients, whole."""
    items = range(len(objective))
    key = (lambda sample: 1000 + sample) if random else None
    loss_of = loss_with_baseline(model, objective, items, share.world, share.batches)
    sums = forward_backward(
        model,
        share.batches(objective, items, key),
        objective.divisor(items),
        share.world,
        loss_of=loss_of,
        gradients=Gradients(model, share.world),
    )
    trained = dict(adapters(model))
    grads = {name: full(parameter.grad) for name, parameter in trained.items()}
    for parameter in trained.values():
        parameter.grad = None
    model.eval()
    valid = evaluate(model, share.batches(objective, items), share.world, loss_of)
    model.train()
    return sums, valid, grads
