"""Machines whose planned bytes are compared with those of live tensors: this host, and a GPU whose
kernels are stand-ins on the processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ft_service.plan.machines import CPU, GIB, Machine
from tests.support.fused_layers import kernels_of_the_processor
from workers.model.products import products

HOST = Machine(CPU, 16 * GIB, shared_memory=True, products=products())
"""This one, without what an allocator holds besides tensors."""
GPU = replace(HOST, shared_memory=False, fuses=True)


def kernels_of_a_gpu(height: int = 32) -> Any:
    """The kernels' module, whose functions allocate what they return and little else.

    `height`: rows that the stand-ins compute at a time, so that what PyTorch's operations write in
    between hardly counts.
    """
    by = kernels_of_the_processor()

    def rows_of(x: Tensor) -> Iterator[slice]:
        return (slice(start, start + height) for start in range(0, len(x), height))

    def normed(x: Tensor, weight: Tensor | None, eps: float, form: int) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        rows, given = (own.flatten(0, -2) for own in (y, x))
        for own in rows_of(rows):
            rows[own] = by.normed(given[own], weight, eps, form)[0]
        return y, torch.full((len(rows),), eps)

    def normed_grad(
        grad: Tensor, x: Tensor, weight: Tensor | None, root: Tensor, form: int
    ) -> Tensor:
        of_x = torch.empty_like(grad)
        rows, *given = (own.flatten(0, -2) for own in (of_x, grad, x))
        for own in rows_of(rows):
            rows[own] = by.normed_grad(*(part[own] for part in given), weight, root[:1], form)
        return of_x

    def rotated(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool
    ) -> tuple[Tensor, Tensor]:
        turned = torch.empty_like(query), torch.empty_like(key)
        for own in rows_of(cos[0]):
            parts = by.rotated(
                query[:, :, own], key[:, :, own], cos[:, own], sin[:, own], back=back
            )
            for whole, part in zip(turned, parts, strict=True):
                whole[:, :, own] = part
        return turned

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        y = torch.empty_like(gate)
        rows, *given = (x.flatten(0, -2) for x in (y, gate, up))
        for own in rows_of(rows):
            rows[own] = by.gated(*(x[own] for x in given))
        return y

    def gated_grad(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.empty_like(gate), torch.empty_like(up)
        of_gate, of_up, *given = (x.flatten(0, -2) for x in (*found, grad, gate, up))
        for own in rows_of(of_gate):
            of_gate[own], of_up[own] = by.gated_grad(*(x[own] for x in given))
        return found

    return SimpleNamespace(
        normed=normed, normed_grad=normed_grad, rotated=rotated, gated=gated, gated_grad=gated_grad
    )
