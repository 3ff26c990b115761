"""What an adapter on stacks of experts changes in a base's files, which hold a stack as one tensor or expert by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.base.names import Piece
from workers.layers.experts import projections_of

_INNER = ".base_layer"


def stack_of(module: str, inner: bool, model: nn.Module, parameters: Sequence[str]) -> str | None:
    """The stack that a module of an adapter changes, by its full name. None: the module is none of experts.

    `inner`: whether there is an adapter inside this module's; `parameters`: the config's `target_parameters`.
    """
    name = module.removesuffix(_INNER)
    try:
        experts = model.get_submodule(name)
    except AttributeError:
        return None
    if all(experts._parameters.get(projection) is None for projection in projections_of(experts)):
        return None
    first, last = (f"{name}.{projection}" for projection in projections_of(experts))
    if name != module or not (inner or any(f".{last}".endswith(f".{parameter}") for parameter in parameters)):
        return first
    return last


@dataclass(frozen=True)
class ExpertsUpdate:
    """The change of a stack of experts, or of the part of it that one tensor holds. Matrices are fp32."""

    a: Tensor
    """[experts, r, wide]"""
    b: Tensor
    """[experts, high, r]"""
    scaling: float
    transposed: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor, experts: int, scaling: float, transposed: bool) -> ExpertsUpdate:
        """From PEFT's matrices [experts · r, wide] and [high, r · experts], scaled by `scaling`."""
        return cls(a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1), scaling, transposed)

    def part(self, expert: int, start: int, end: int) -> ExpertsUpdate:
        """Of rows [start, end) of one expert's matrix [high, wide]."""
        return ExpertsUpdate(self.a[expert : expert + 1], self.b[expert : expert + 1, start:end], self.scaling, False)

    def rows(self, base: Tensor, start: int, end: int) -> Tensor:
        """Rows [start, end) of the merged tensor from the base's, fp32: of a stack, matrices."""
        if base.ndim == 2:
            return base + self.scaling * (self.b[0, start:end] @ self.a[0])
        change = self.b[start:end] @ self.a[start:end]
        return base + self.scaling * (change.mT if self.transposed else change)


def updates_by_tensor(
    pieces: Sequence[Piece], heights: Callable[[str], int], whole: Callable[[], ExpertsUpdate]
) -> Mapping[str, Callable[[], ExpertsUpdate]]:
    """Tensor of the base's files → its update, made when it is asked for. `heights`: rows of a tensor."""
    if len(pieces) == 1:
        return {pieces[0].tensor: whole}
    updates: dict[str, Callable[[], ExpertsUpdate]] = {}
    experts = whole().a.shape[0]
    of_one = len(pieces) // experts
    for expert in range(experts):
        first = 0
        for piece in pieces[expert * of_one : (expert + 1) * of_one]:
            span = (expert, first, first + heights(piece.tensor))
            updates[piece.tensor] = lambda span=span: whole().part(*span)
            first = span[2]
    return updates


def expected_shapes(stack: torch.Size, experts: int, r: int, transposed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and B for a stack as transformers has it."""
    _, high, wide = (stack[0], stack[2], stack[1]) if transposed else stack
    return (experts * r, wide), (high, r * experts)
