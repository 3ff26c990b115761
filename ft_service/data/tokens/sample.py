"""One sample as the model sees it.

Without torch, since the service's own processes count tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ft_service.data.sample_kinds import Picture as Picture


@dataclass(frozen=True)
class ImageUse:
    """Where a sample holds a picture."""

    begin: int
    """The first token of what stands for the picture, in its sample: placeholders, and the marks
    that the base writes around and between them."""
    end: int
    """The token behind the last one."""
    picture: Picture


@dataclass(frozen=True)
class Tokens:
    """The tokens of a sample.

    `ids`: int32 [length]. `targets`: bool [length], whether the model is trained to produce the
    token.
    """

    ids: np.ndarray
    targets: np.ndarray
    continues: bool = False
    """It is of the same record as the sample before it."""
    images: tuple[ImageUse, ...] = ()
    """Its pictures, in the order of their places. None of their tokens is a target."""
    label: bool | None = None
    """Whether its answer is a good one. None: the file has no labels."""

    @property
    def target_count(self) -> int:
        """The number of targets that are predicted: the first token has no predecessor."""
        return int(np.count_nonzero(self.targets[1:]))

    def is_same(self, other: Tokens) -> bool:
        """True if the other sample has the same tokens, targets and pictures."""
        return (
            np.array_equal(self.ids, other.ids)
            and np.array_equal(self.targets, other.targets)
            and [use.picture.key for use in self.images]
            == [use.picture.key for use in other.images]
        )

    def cut(self, max_length: int) -> Tokens:
        """The sample's first tokens: `max_length`, or those before a picture that would be cut."""
        if len(self.ids) <= max_length:
            return self
        crossing = (use.begin for use in self.images if use.begin < max_length < use.end)
        end = next(crossing, max_length)
        images = tuple(use for use in self.images if use.end <= end)
        return replace(self, ids=self.ids[:end], targets=self.targets[:end], images=images)
