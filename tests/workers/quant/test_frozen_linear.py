"""The linear layer on a quantised weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workers.layers.linear import FrozenLinear
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import FP8Weight, NF4Weight

ROWS = 10
COLS = 200


@pytest.mark.parametrize("kind", [NF4Weight, FP8Weight])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_dense_one_and_saves_no_dense_copy(
    kind: type[RowQuantized], bias: bool
) -> None:
    linear = nn.Linear(COLS, ROWS, bias=bias, dtype=torch.float32)
    frozen = FrozenLinear.on_meta(linear, kind)
    stored = kind.quantize(linear.weight.detach())
    frozen.weight = nn.Parameter(stored, requires_grad=False)
    x = torch.randn(2, 3, COLS, requires_grad=True)
    saved: list[tuple[torch.Size, torch.dtype]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor.shape, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = frozen(x)
    expected = F.linear(x, stored.dequantize(), linear.bias)
    assert torch.equal(y, expected)
    gradient = torch.randn_like(y)
    assert torch.allclose(
        torch.autograd.grad(y, x, gradient)[0],
        torch.autograd.grad(expected, x, gradient)[0],
        rtol=1e-6,
        atol=1e-6,
    )
    assert not [dtype for shape, dtype in saved if shape == (ROWS, COLS) and dtype.itemsize > 1], (
        "no dense copy"
    )
