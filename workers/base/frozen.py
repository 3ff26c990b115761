"""The frozen weights of a rank while they are loaded, and what loading them did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.quant.rowwise import RowQuantized

Level = Literal["info", "warn"]
Place = tuple[nn.Module, str]
"""A module and the name under which it registers a parameter."""


@dataclass
class FrozenWeight:
    """A frozen parameter on meta, and what takes its place on this rank."""

    parameter: nn.Parameter
    places: list[Place]
    rows: tuple[int, int]
    """This rank's rows [start, end)."""
    storage: Tensor = field(default_factory=lambda: torch.empty(0))
    """Where they go, once allocated."""

    @property
    def face(self) -> Tensor:
        """This rank's part on meta. The dtype of a plain one is that in which it is cached."""
        return self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter.data

    def allocate(self, compute_dtype: torch.dtype, device: torch.device) -> None:
        """Make the storage. `compute_dtype`: the dtype of plain weights that are not sharded, and of the faces of quantised
        ones, as of what is gathered; and of vectors: architectures round what they give their last norm to its dtype, gathered
        or not.
        """
        face = self.face
        shape = (self.rows[1] - self.rows[0], *self.parameter.shape[1:])
        dtype = face.dtype if isinstance(self.parameter, DTensor) and len(shape) > 1 else compute_dtype
        if isinstance(face, RowQuantized):
            self.storage = type(face).empty(shape, dtype, device)
        else:
            self.storage = torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Loaded:
    """What loading did. All but the bytes are the same on every rank."""

    changed: Mapping[str, float]
    """Base parameter → ‖stored - read‖ / ‖read‖ of the whole of it, for those that storing changed."""
    requantized: Mapping[str, str]
    """Base parameter → the layout that the base held it quantised in, for those that had to be quantised again."""
    converted: Mapping[str, str]
    """The same for those that the job stores otherwise though a format holds them as they are, or that it stores plain."""
    kept: Mapping[str, str]
    """The same for those that are stored as the base held them."""
    cached: bool
    """Whether the cache served it."""
    bytes_read: int
    """Of this rank, from the base or from the cache."""
    notes: Sequence[tuple[Level, str]] = ()
    """(level, text): what happened in the cache."""

    def messages(self) -> Iterator[tuple[Level, str]]:
        """Events for the job's user: (level, text)."""
        yield from self.notes
        for layout in sorted(set(self.kept.values())):
            count = list(self.kept.values()).count(layout)
            yield "info", f"{count} weights of the base came as {layout} and are kept exactly."
        for layout in sorted(set(self.converted.values())):
            count, mean, worst = self._change(self.converted, layout)
            yield (
                "info",
                f"{count} weights of the base came as {layout} and are stored as the job says, from exactly the values that "
                f"they stand for. Rounding changed them by {mean:.2%} of their norm on average, by {worst:.2%} at most.",
            )
        for layout in sorted(set(self.requantized.values())):
            count, mean, worst = self._change(self.requantized, layout)
            yield (
                "warn",
                f"{count} weights of the base came as {layout}, which no format here can hold as it is, and were quantised "
                f"again. That changed them by {mean:.2%} of their norm on average, by {worst:.2%} at most.",
            )

    def _change(self, weights: Mapping[str, str], layout: str) -> tuple[int, float, float]:
        """How many weights have a layout, and their mean and largest change."""
        errors = [self.changed[name] for name, its_layout in weights.items() if its_layout == layout]
        return len(errors), sum(errors) / len(errors), max(errors)
