"""Selective activation checkpointing: what is kept of a layer, and what is made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workers.model.activation_checkpointing import checkpoint_activations


class Counting(TorchDispatchMode):
    """Counts operators by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def into_itself(y: Tensor) -> Tensor:
    y += 1
    return y


def into_a_view(y: Tensor) -> Tensor:
    turned = y.permute(2, 0, 1)
    turned += 1
    return turned


def into_another(y: Tensor) -> Tensor:
    return torch.sin_(y + 1)


@pytest.mark.parametrize(
    ("write", "products"), [(into_itself, 1), (into_a_view, 1), (into_another, 0)]
)
def test_what_a_layer_writes_into_is_made_again_and_all_else_is_not(
    write: Callable[[Tensor], Tensor], products: int
) -> None:
    """Gemma 3n adds to what a product has returned; kept, it would be added twice."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return write(x @ weight).square()

    weight = torch.randn(12, 10)
    x = torch.randn(2, 3, 12, requires_grad=True)
    layer = Layer()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    checkpoint_activations([layer], "selective", adapter_rank=4)
    loss = layer(x).sum()
    with Counting() as counting:
        (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    assert counting.seen["aten.mm.default"] == products + 1, "and the gradient"
