"""One sample as the model sees it.

Without torch, since the service's own processes count tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


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

    @property
    def target_count(self) -> int:
        """The number of targets that are predicted: the first token has no predecessor."""
        return int(np.count_nonzero(self.targets[1:]))

    def is_same(self, other: Tokens) -> bool:
        """True if the other sample has the same tokens and the same targets."""
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.targets, other.targets)

    def cut(self, max_length: int) -> Tokens:
        """The sample's first tokens."""
        if len(self.ids) <= max_length:
            return self
        return replace(self, ids=self.ids[:max_length], targets=self.targets[:max_length])
