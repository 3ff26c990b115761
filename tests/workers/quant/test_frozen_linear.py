"""The linear layer on a quantised weight, also where a dispatch mode sees its operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from workers.layers.linear import FrozenLinear
from workers.quant import frozen_linear as module
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


class Seen(TorchDispatchMode):
    """Which of this module's operators were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ft_service":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def stored(kind: type[RowQuantized]) -> tuple[list[torch.Tensor], torch.Tensor]:
    weight = kind.quantize(torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)))
    return list(weight.parts), weight.dequantize()


@pytest.mark.parametrize("kind", [NF4Weight, FP8Weight])
def test_a_dispatch_mode_sees_two_operators_with_the_same_numbers(kind: type[RowQuantized]) -> None:
    name = kind.NUMERICS.name
    parts, dense = stored(kind)
    x = torch.randn(2, 3, COLS, requires_grad=True)
    with Seen() as seen:
        y = module.frozen_linear(x, parts, name, COLS)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert seen.names == ["frozen_linear", "frozen_linear_grad"]
    assert torch.equal(y, F.linear(x, dense))
    assert torch.allclose(grad, torch.ones(2, 3, ROWS) @ dense, rtol=1e-6, atol=1e-5)
    assert not module.watched()


@pytest.mark.parametrize("kind", [NF4Weight, FP8Weight])
def test_without_numbers_forward_and_backward_have_the_shapes_of_a_dense_layer(
    kind: type[RowQuantized],
) -> None:
    parts, _ = stored(kind)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, COLS, requires_grad=True)
        y = module.frozen_linear(x, parts, kind.NUMERICS.name, COLS)
        assert y.shape == (2, 3, ROWS)
        (grad,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert grad.shape == x.shape


def test_a_plain_weight_is_multiplied_as_it_is() -> None:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.randn(4, COLS).bfloat16()
    plain = module.PLAIN
    assert torch.equal(module.product(x, [weight], plain, COLS), F.linear(x, weight))
    grad = torch.randn(4, ROWS).bfloat16()
    assert torch.equal(module.product_grad(grad, [weight], plain, COLS), grad @ weight)
    assert module.multiplied([weight], plain, COLS, torch.bfloat16) is weight
    rows = module.rows_of([weight], plain, COLS, slice(2, 5))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, weight[2:5].float())


@pytest.mark.parametrize("kind", [NF4Weight, FP8Weight])
def test_rows_of_a_stored_weight_are_rows_of_its_values(kind: type[RowQuantized]) -> None:
    parts, dense = stored(kind)
    rows = module.rows_of(parts, kind.NUMERICS.name, COLS, slice(3, 7))
    assert torch.equal(rows, dense[3:7])
