"""Rows of experts taken from tokens, gated and added up: the numbers and gradients of PyTorch's
indexing, and the kernels by Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.triton_programs import run_with_triton
from workers.layers import expert_rows
from workers.layers.expert_rows import Route, gated_halves, rows_of_tokens, sums_by_token

EXPERTS = 5
Numbers = list[Tensor]


def route_of(tokens: int, k: int) -> Route:
    """One expert is met by nobody."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(k).indices
    return Route.of(chosen, EXPERTS)


def both(act: Any, *inputs: Tensor) -> Numbers:
    """What is made of the inputs, and their gradients."""
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    made = act(*own)
    grad = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(made.dtype)
    return [made.detach(), *torch.autograd.grad(made, own, grad)]


def assert_close(found: Numbers, expected: Numbers, rtol: float) -> None:
    for own, right in zip(found, expected, strict=True):
        assert own.dtype == right.dtype
        assert torch.allclose(own, right, rtol=rtol, atol=rtol)


def test_a_route_knows_rows_tokens_and_choices() -> None:
    route = Route.of(torch.tensor([[2, 0], [0, 4], [2, 4]]), EXPERTS)
    assert route.counts.tolist() == [2, 0, 2, 0, 2]
    assert route.choices.tolist() == [1, 2, 0, 4, 3, 5]
    assert route.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert route.rows.tolist() == [[2, 0], [1, 4], [3, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_have_the_gradients_of_indexing(dtype: torch.dtype) -> None:
    route = route_of(7, 3)
    x = torch.randn(7, 6, dtype=dtype)
    found = both(lambda x: rows_of_tokens(x, route), x)
    assert_close(found, both(lambda x: x[route.tokens], x), 1e-6)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    ("of_rows", "of_shares", "rtol"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.bfloat16, torch.bfloat16, 2e-2),
    ],
)
def test_sums_by_token_have_the_gradients_of_indexing(
    of_rows: torch.dtype, of_shares: torch.dtype, rtol: float, scaled: bool
) -> None:
    route = route_of(9, 2)
    y = torch.randn(18, 6).to(of_rows)
    shares = [torch.rand(9, 2).to(of_shares)] * scaled

    def found(y: Tensor, own: Tensor | None = None) -> Tensor:
        return sums_by_token(y, own, route, of_rows)

    def expected(y: Tensor, own: Tensor | None = None) -> Tensor:
        terms = y[route.rows]
        terms = terms if own is None else terms * own[..., None]
        return terms.sum(dim=1).to(of_rows)

    assert_close(both(found, y, *shares), both(expected, y, *shares), rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 0)])
def test_gated_halves_have_the_bits_of_separate_operations(dtype: torch.dtype, rtol: float) -> None:
    def stock(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    given = torch.randn(11, 12).to(dtype)
    assert_close(both(gated_halves, given), both(stock, given), rtol)


def test_no_token_is_no_row() -> None:
    route = Route.of(torch.empty(0, 2, dtype=torch.int64), EXPERTS)
    found = both(lambda x: rows_of_tokens(x, route), torch.empty(0, 4))
    assert [own.shape for own in found] == [(0, 4)] * 2
    made = sums_by_token(torch.empty(0, 4), torch.empty(0, 2), route, torch.float32)
    assert made.shape == (0, 4)


COMPUTES = """
import torch
from tests.support.triton_programs import correct_casts
correct_casts(by_way_of_fp16=False)
from workers.layers import expert_rows, expert_rows_kernels as kernels

expert_rows._compare(kernels, torch.device("cpu"))
route = expert_rows.Route.of(torch.empty(0, 2, dtype=torch.int64), 3)
empty = torch.empty(0, 64, dtype=torch.bfloat16).requires_grad_()
shares = torch.empty(0, 2)
assert expert_rows.gated_halves(empty, kernels).shape == (0, 32)
made = expert_rows.sums_by_token(empty, shares, route, torch.bfloat16, kernels)
assert made.shape == (0, 64)
assert torch.autograd.grad(made, empty, torch.empty_like(made))[0].shape == (0, 64)
"""


def test_the_kernels_compute_what_they_are_compared_with(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")


def kernels_of_the_processor() -> Any:
    """What the kernels compute, by the functions themselves."""

    def gated_halves_grad(grad: Tensor, x: Tensor) -> Tensor:
        own = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(gated_halves(own), own, grad)[0]

    def summed(y: Tensor, shares: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return expert_rows._summed(y, shares, rows, dtype, None)

    def sums_grad(
        grad: Tensor, y: Tensor, shares: Tensor, choices: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = torch.empty_like(choices).scatter_(0, choices, torch.arange(len(choices)))
        route = Route(choices, choices // shares.shape[1], rows.view_as(shares), choices)
        return expert_rows._sums_grad(grad, y, shares, route)

    return SimpleNamespace(
        gated_halves=gated_halves,
        gated_halves_grad=gated_halves_grad,
        summed=summed,
        sums_grad=sums_grad,
    )


def test_kernels_that_compute_something_else_are_not_used() -> None:
    good = kernels_of_the_processor()
    device = torch.device("cpu")
    expert_rows._compare(good, device)
    for name, wrong, said in (
        ("gated_halves", lambda x: gated_halves(x.roll(1, 1)), "gating, forward"),
        ("gated_halves_grad", lambda grad, x: x, "gating, backward"),
        (
            "summed",
            lambda y, shares, rows, dtype: good.summed(y, shares, rows.roll(1, 1), dtype),
            "sums, forward",
        ),
        ("sums_grad", lambda grad, y, shares, choices: (y, shares), "sums, backward"),
    ):
        other = SimpleNamespace(**{**vars(good), name: wrong})
        with pytest.raises(AssertionError, match=said):
            expert_rows._compare(other, device)
