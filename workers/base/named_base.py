"""A base under the names of the model's parameters: where their rows lie, and how those rows are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ft_service.bases.published_layouts import is_companion
from ft_service.spec import WeightFormat
from workers.base.names import NamedTensors, Piece, by_parameter
from workers.base.stacks import Stack
from workers.base.stored import StoredBase, StoredWeight


class WeightsOnly:
    """A base without the companion tensors of its quantised weights; a plain base has none."""

    def __init__(self, base: StoredBase) -> None:
        self._base = base

    def names(self) -> list[str]:
        return [name for name in self._base.names() if not (self._base.declared and is_companion(name))]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def by_outputs(self, name: str) -> bool:
        return self._base.by_outputs(name)

    def rows(self, name: str, start: int, end: int, index: int | None = None, *, transposed: bool = False) -> Tensor:
        return self._base.rows(name, start, end, index, transposed=transposed)

    def whole(self, name: str) -> Tensor:
        return self._base.whole(name)


class NamedBase:
    """The values of a model's frozen parameters, by rows, and the parts of those that the base holds quantised."""

    def __init__(self, model: nn.Module, base: StoredBase, plain: Callable[[str], str]) -> None:
        """`plain`: turns the model's parameter names into the base's. Raises SpecError for an unknown layout."""
        self._base = base
        self.tensors: NamedTensors = by_parameter(model, WeightsOnly(base), plain)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)

    def rows(self, name: str, start: int, end: int) -> Tensor:
        return self.tensors.rows(name, start, end)

    def stored(self, name: str) -> StoredWeight | None:
        """How the base quantises a parameter. None: it does not."""
        return stored_as(self._base, self.tensors.pieces(name)) if self._base.declared else None


def stored_as(base: StoredBase, pieces: Sequence[Piece]) -> StoredWeight | None:
    """How the tensors that make one parameter are quantised. None: they are not, or not all alike."""
    stored = [_stored_piece(base, piece) for piece in pieces]
    quantized = [weight for weight in stored if weight is not None]
    if len(quantized) < len(pieces) or len({weight.layout for weight in quantized}) != 1:
        return None
    return quantized[0] if len(quantized) == 1 else Stacked(quantized)


def _stored_piece(base: StoredBase, piece: Piece) -> StoredWeight | None:
    stored = base.stored(piece.tensor)
    if piece.index is None:
        return stored
    return stored.matrix(piece.index, transposed=piece.transposed) if isinstance(stored, Stack) else None


class Stacked:
    """Weights of one layout stacked by rows, as the experts of a mixture are."""

    def __init__(self, weights: Sequence[StoredWeight]) -> None:
        self._weights = weights
        self.layout = weights[0].layout
        self.format: WeightFormat | None = weights[0].format
        self.exact = all(weight.exact for weight in weights)
        self.shape: tuple[int, ...] = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        of_weights = [weight.parts(low, high) for weight, low, high in self._within(start, end)]
        return tuple(torch.cat(parts) for parts in zip(*of_weights, strict=True))

    def rows(self, start: int, end: int) -> Tensor:
        return torch.cat([weight.rows(low, high) for weight, low, high in self._within(start, end)])

    def _within(self, start: int, end: int) -> list[tuple[StoredWeight, int, int]]:
        """The weights that rows [start, end) lie in, with their own rows. An empty range: the first weight, without rows."""
        within, first = [], 0
        for weight in self._weights:
            low, high = max(start - first, 0), min(end - first, weight.shape[0])
            if low < high:
                within.append((weight, low, high))
            first += weight.shape[0]
        return within or [(self._weights[0], 0, 0)]
