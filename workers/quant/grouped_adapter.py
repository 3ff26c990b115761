"""The adapters of many experts as one product: each row of the input meets the two small matrices of its expert.

As in `grouped_linear`, the input is sorted by expert. On processors experts that no row meets cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.quant.grouped_linear import is_grouped


def grouped_matrices(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """x [n, in], sorted by group, times its group's matrix of [groups, out, in] → [n, out], in x's dtype; both have gradients.

    `counts` int64 [groups]: how many rows of x each group has.
    """
    if is_grouped(x, matrices.shape[1], matrices.shape[2]):
        return F.grouped_mm(x.contiguous(), matrices.transpose(1, 2), offs=counts.cumsum(0).int())
    return _product(x, matrices, counts)


@torch.library.custom_op("ft_service::grouped_matrices", mutates_args=())
def _product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], matrices.shape[1])
    for group, own in _groups(counts):
        y[own] = x[own] @ matrices[group].t()
    return y


@torch.library.custom_op("ft_service::grouped_matrices_grad", mutates_args=())
def _product_grad(grad: Tensor, x: Tensor, matrices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    of_x, of_matrices = torch.empty_like(x), torch.zeros_like(matrices)
    for group, own in _groups(counts):
        of_x[own] = grad[own] @ matrices[group]
        of_matrices[group] = grad[own].t() @ x[own]
    return of_x, of_matrices


def _groups(counts: Tensor) -> list[tuple[int, slice]]:
    ends = counts.cumsum(0).tolist()
    spans = zip([0, *ends], ends, strict=False)
    return [(group, slice(start, end)) for group, (start, end) in enumerate(spans) if start < end]


@_product.register_fake
def _(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], matrices.shape[1])


@_product_grad.register_fake
def _(grad: Tensor, x: Tensor, matrices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(matrices)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_product_grad(grad.contiguous(), *ctx.saved_tensors), None


_product.register_autograd(_backward, setup_context=_setup_context)
