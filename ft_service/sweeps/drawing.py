"""Values of a sweep drawn at random: the same ones for the same ranges and seed, on any version of Python. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from ft_service.spec.values import Number, Strict

TRIES = 100
"""Draws for each combination that is wanted, before what there is is all that there is."""


class Range(Strict):
    """Numbers from `min` to `max`, both included. Whole ones where both are whole."""

    min: Annotated[int, Field(strict=True)] | Number
    max: Annotated[int, Field(strict=True)] | Number
    log: bool = False
    """Even in the logarithm: as many between 1e-5 and 1e-4 as between 1e-4 and 1e-3."""

    @model_validator(mode="after")
    def _in_order(self) -> Range:
        if self.min >= self.max:
            raise ValueError(f"min = {self.min:g} must be less than max = {self.max:g}")
        if self.log and self.min <= 0:
            raise ValueError(f"min = {self.min:g}: a logarithmic range is of numbers above 0")
        return self

    def at(self, share: float) -> int | float:
        """The number at a share in [0, 1) of the range; a fraction to three digits."""
        if isinstance(self.min, int) and isinstance(self.max, int):
            high = self.max + 1
            value = self.min * (high / self.min) ** share if self.log else self.min + share * (high - self.min)
            return min(self.max, max(self.min, math.floor(value)))
        value = self.min * (self.max / self.min) ** share if self.log else self.min + share * (self.max - self.min)
        return min(self.max, max(self.min, float(f"{value:.2e}")))


Choices = Range | Sequence[Any]
"""Of one option: a range, or the values to choose among."""


def drawn(options: Mapping[str, Choices], samples: int, seed: int) -> list[dict[str, Any]]:
    """Combinations of values, all different: `samples` of them, or fewer if there are not so many."""
    source = random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(samples * TRIES):
        drawing = {name: _one_of(choices, source.random()) for name, choices in options.items()}
        if drawing not in found:
            found.append(drawing)
        if len(found) == samples:
            break
    return found


def _one_of(choices: Choices, share: float) -> Any:
    return choices.at(share) if isinstance(choices, Range) else choices[math.floor(share * len(choices))]
