"""Validation splits: a share of a training file that is set aside.

Pure: the same tokens and seed give the same samples, for any order of the file, on any number of
ranks, and after a resume.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from ft_service.data.tokens.token_set import TokenSet, hashed_use
from ft_service.errors import DataError
from ft_service.spec import JobSpec

_EPSILON = 1e-9
"""Tolerance of products of a share: 0.29 of 100 samples are 29."""


@dataclass(frozen=True)
class Split:
    """The options of a validation split."""

    share: float
    seed: int

    @classmethod
    def of(cls, spec: JobSpec) -> Split | None:
        """The split of a job. None: it sets no samples aside."""
        return None if spec.validation_split is None else cls(spec.validation_split, spec.seed)


def split_off(samples: TokenSet, split: Split, name: str) -> tuple[TokenSet, TokenSet]:
    """Training and validation samples of a whole file, in its order.

    They have no record in common. `name`: the file's, for messages. Raises DataError if there are
    too few records.
    """
    of_samples = set_aside(content_digests(samples), split, name)[samples.records]
    return samples.some(~of_samples), samples.some(of_samples)


def set_aside(contents: np.ndarray, split: Split, name: str) -> np.ndarray:
    """A mask, bool [records]: whether a record is for validation.

    `contents`: uint64 [records], equal for equal records.

    Groups of equal records are taken whole, in an order drawn from their content and the seed,
    while they fit in the share. Raises DataError.
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
    if not taken:  # every group of equal records is larger than the share
        chosen[order[np.argmin(sizes[order])]] = True
    return chosen[group]


def _drawn(values: np.ndarray, seed: int) -> np.ndarray:
    """Pseudo-random uint64 numbers from values and a seed, different for different values: the
    finalizer of SplitMix64.
    """
    start = int.from_bytes(
        hashlib.blake2b(f"validation/{seed}".encode(), digest_size=8).digest(), "little"
    )
    mixed = values ^ np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _too_few(split: Split, name: str, why: str) -> DataError:
    least = math.ceil(1 / max(split.share, _EPSILON) - _EPSILON)
    return DataError(
        f"validation_split = {split.share:g}: {name} has {why}. Give at least {max(2, least)} "
        "different samples, a "
        "validation_file, or neither.",
        param="validation_split",
        code="invalid_training_file",
    )


def content_digests(samples: TokenSet) -> np.ndarray:
    """Digests of each record's uncut tokens, uint64 [records]; equal digests mean equal records.

    Reads every token once.

    `samples`: of a whole file. Targets are not part of the digest: with other weights the text is
    the same.
    """
    ids = samples.ids
    keys = samples.pictures.keys if samples.pictures is not None else ()
    edges = [*np.flatnonzero(np.diff(samples.records, prepend=-1)).tolist(), len(samples)]
    digests = np.empty(len(edges) - 1, np.uint64)
    begins = samples.begins.tolist()
    lengths = samples.lengths.tolist()
    for record in range(len(digests)):
        digest = hashlib.blake2b(digest_size=8)
        for sample in range(edges[record], edges[record + 1]):
            begin = begins[sample]
            length = lengths[sample]
            digest.update(length.to_bytes(8, "little"))
            digest.update(ids[begin : begin + length].astype("<i4", copy=False).data)
            for use in samples.uses_within(begin, begin + length):
                digest.update(hashed_use(use[0] - begin, use[1] - begin, keys[use[2]]))
        digests[record] = int.from_bytes(digest.digest(), "little")
    return digests
