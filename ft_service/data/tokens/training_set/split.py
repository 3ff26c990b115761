"""A share of a training file that is set aside for validation. Pure: the same tokens and seed give the same samples, in
whatever order they stand, on any number of ranks, and again after a resume.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.contents import content_digests
from ft_service.errors import DataError
from ft_service.spec import JobSpec

_EPSILON = 1e-9
"""0.29 of 100 are 29."""


@dataclass(frozen=True)
class Split:
    """What a job says about it."""

    share: float
    seed: int

    @classmethod
    def of(cls, spec: JobSpec) -> Split | None:
        """None: the job sets nothing aside."""
        return None if spec.validation_split is None else cls(spec.validation_split, spec.seed)


def split_off(samples: TokenSet, split: Split, name: str, *, pairs: bool = False) -> tuple[TokenSet, TokenSet]:
    """Training and validation samples of a set, in its order. Neither holds a record of the other; the two of a pair stay
    together. `name`: of the file, for messages. Raises DataError where there are too few to split.
    """
    aside = set_aside(content_digests(samples, together=2 if pairs else 1), split, name)
    of_samples = aside.repeat(2) if pairs else aside
    return samples.some(~of_samples), samples.some(of_samples)


def set_aside(contents: np.ndarray, split: Split, name: str) -> np.ndarray:
    """bool [records]: it is for validation. `contents`: uint64 [records], equal for equal records.

    Whole groups of equal records are taken in an order drawn from content and seed, as long as they fit in the share. Raises
    DataError.
    """
    wanted = int(split.share * len(contents) + _EPSILON)
    if not wanted:
        raise _too_few(split, name, f"{len(contents):,} samples, of which that is less than one")
    distinct, group, sizes = np.unique(contents, return_inverse=True, return_counts=True)
    if len(distinct) == 1:
        raise _too_few(split, name, f"{len(contents):,} samples that are all the same")
    chosen = np.zeros(len(distinct), np.bool_)
    taken = 0
    order = np.argsort(_drawn(distinct, split.seed), kind="stable")
    for index in order.tolist():
        if taken + sizes[index] <= wanted:
            chosen[index] = True
            taken += int(sizes[index])
        if taken == wanted:
            break
    if not taken:  # every sample occurs more often than the share has room for
        chosen[order[np.argmin(sizes[order])]] = True
    return chosen[group]


def _drawn(values: np.ndarray, seed: int) -> np.ndarray:
    """uint64 numbers drawn from values and a seed, different ones of different ones: the finalizer of SplitMix64."""
    start = int.from_bytes(hashlib.blake2b(f"validation/{seed}".encode(), digest_size=8).digest(), "little")
    mixed = values ^ np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _too_few(split: Split, name: str, why: str) -> DataError:
    least = math.ceil(1 / max(split.share, _EPSILON) - _EPSILON)
    return DataError(
        f"validation_split = {split.share:g}: {name} has {why}. Give at least {max(2, least)} different samples, a "
        "validation_file, or neither.",
        param="validation_split",
        code="invalid_training_file",
    )
