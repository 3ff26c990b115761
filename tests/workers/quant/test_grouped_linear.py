"""Grouped products: one for all groups, or lot by lot, equals the product of each row with its
group's matrix.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ft_service import kernel_limits
from workers.quant import grouped_linear as module
from workers.quant.grouped_linear import (
    PLAIN,
    GroupedWeight,
    grouped_linear,
    grouped_matrices,
    grouped_product,
    is_grouped,
)
from workers.quant.weights import FP8Weight, NF4Weight

ROWS = 24
COLS = 64
COUNTS = {
    "all met": [3, 1, 4, 1, 5],
    "none at the ends": [0, 0, 9, 5, 0],
    "one takes all": [0, 14, 0, 0, 0],
    "the last": [0, 0, 0, 0, 14],
}


def stored(name: str) -> list[Tensor]:
    weight = torch.randn(5 * ROWS, COLS, generator=torch.Generator().manual_seed(0))
    kinds = {"nf4": NF4Weight, "fp8": FP8Weight}
    return list(kinds[name].quantize(weight).parts) if name in kinds else [weight]


def factors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(14, COLS, generator=generator), torch.randn(14, ROWS, generator=generator)


@pytest.mark.parametrize("name", [PLAIN, "nf4", "fp8"])
@pytest.mark.parametrize("lot", [1, 2, 5])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_grouped_product_is_the_loop(
    name: str, lot: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_limits, "GROUPED_BYTES", lot * ROWS * COLS * 4)
    x, grad = factors()
    x.requires_grad_()
    parts = stored(name)
    numbers = torch.tensor(counts)
    y = grouped_linear(x, numbers, parts, name, ROWS, COLS)
    y.backward(grad)
    assert x.grad is not None
    weight = GroupedWeight(parts, name, ROWS, COLS)
    found = grouped_product(x.detach(), numbers, weight, transposed=True)
    of_x = grouped_product(grad, numbers, weight, transposed=False)
    assert torch.allclose(found, y.detach(), rtol=1e-6, atol=1e-5)
    assert torch.allclose(of_x, x.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("counts", [[9, 0, 17, 33, 1], [0, 60, 0, 0, 0], [1, 1, 1, 57, 0]])
def test_in_bf16_groups_are_filled_by_rows_of_the_next(counts: list[int]) -> None:
    """Each row comes to the product with the matrix of its own group."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (
        torch.randn(sum(counts), width, generator=generator).bfloat16() for width in (COLS, ROWS)
    )
    x.requires_grad_()
    (weight,) = (part.bfloat16() for part in stored(PLAIN))
    y = grouped_linear(x, torch.tensor(counts), [weight], PLAIN, ROWS, COLS)
    y.backward(grad)
    group = torch.arange(5).repeat_interleave(torch.tensor(counts))
    each = weight.view(5, ROWS, COLS)[group].float()
    assert x.grad is not None
    expected = torch.einsum("nc,nrc->nr", x.detach().float(), each)
    of_x = torch.einsum("nr,nrc->nc", grad.float(), each)
    assert torch.allclose(y.float(), expected, rtol=1e-2, atol=0.1)
    assert torch.allclose(x.grad.float(), of_x, rtol=1e-2, atol=0.1)


class Forbidding(TorchDispatchMode):
    """Raises where the host would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        assert func not in waits, f"{func} waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lot", [2, 5])
def test_the_host_never_waits_for_the_number_of_rows(
    lot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta tensors there are no numbers to wait for: reading one raises an error."""
    monkeypatch.setattr(kernel_limits, "GROUPED_BYTES", lot * ROWS * COLS * 2)
    there = torch.device("meta")
    x, grad = (factor.to(there, torch.bfloat16) for factor in factors())
    weight = GroupedWeight([part.to(there) for part in stored("fp8")], "fp8", ROWS, COLS)
    counts = torch.tensor(COUNTS["all met"], device=there)
    with Forbidding():
        y = grouped_product(x, counts, weight, transposed=True)
        of_x = grouped_product(grad, counts, weight, transposed=False)
    assert (y.shape, of_x.shape) == ((14, ROWS), (14, COLS))


@pytest.mark.parametrize(("r", "cols"), [(1, 64), (4, 64), (6, 30), (8, 64), (12, 64)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_adapters_of_any_r_take_the_grouped_product_and_get_the_loop_s_results(
    r: int, cols: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: numbers are whole and small, so that no order of a sum rounds."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((14, cols), (5, r, cols), (5, 10, r), (14, 10))
    x, a, b, grad = (torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes)
    numbers = torch.tensor(counts)
    sizes = []

    def is_grouped(x: Tensor, rows: int, cols: int) -> bool:
        sizes.append((rows, cols))
        return rows % 8 == cols % 8 == 0

    def computed() -> list[Tensor]:
        factors = [factor.clone().requires_grad_() for factor in (x, a, b)]
        y = grouped_matrices(grouped_matrices(factors[0], factors[1], numbers), factors[2], numbers)
        return [y.detach(), *torch.autograd.grad(y, factors, grad)]

    loop = computed()
    monkeypatch.setattr(module, "is_grouped", is_grouped)
    monkeypatch.setattr(module, "_adapter_product", None)
    grouped = computed()
    assert all(torch.equal(*pair) for pair in zip(loop, grouped, strict=True))
    assert [rows % 8 + cols % 8 for rows, cols in sizes] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_multiplies_group_by_group(dtype: torch.dtype) -> None:
    assert not is_grouped(torch.zeros(3, 64, dtype=dtype), 64, 64)


@pytest.mark.parametrize(
    ("there", "dtype", "n", "size", "capability", "grouped"),
    [
        (True, torch.bfloat16, 3, 64, 9, True),
        (True, torch.bfloat16, 3, 64, 1, False),
        (True, torch.bfloat16, 3, 60, 9, False),
        (True, torch.bfloat16, 0, 64, 9, False),
        (True, torch.float32, 3, 64, 9, False),
        (False, torch.bfloat16, 3, 64, 9, False),
    ],
)
def test_a_gpu_has_a_kernel_for_rows_in_bf16_of_matrices_that_it_takes(
    there: bool,
    dtype: torch.dtype,
    n: int,
    size: int,
    capability: int,
    grouped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    x: Any = SimpleNamespace(is_cuda=there, dtype=dtype, shape=(n, size), device="cuda")
    assert is_grouped(x, size, size) is grouped


@pytest.mark.parametrize("name", [PLAIN, "nf4"])
def test_without_numbers_results_and_gradients_have_their_shapes(name: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(14, COLS, requires_grad=True)
        counts = torch.tensor(COUNTS["all met"])
        y = grouped_linear(x, counts, stored(name), name, ROWS, COLS)
        assert y.shape == (14, ROWS)
        (grad,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert grad.shape == x.shape
        matrices = torch.empty(5, ROWS, COLS, requires_grad=True)
        y = grouped_matrices(x, matrices, counts)
        assert y.shape == (14, ROWS)
        of_x, of_matrices = torch.autograd.grad(y, (x, matrices), torch.empty_like(y))
        assert (of_x.shape, of_matrices.shape) == (x.shape, matrices.shape)
