"""The samples of a data file as flat arrays, in memory or mapped from files: any number of them, and no object a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex, overload

import numpy as np

from ft_service.data.tokens.sample import Tokens


@dataclass(frozen=True, eq=False)
class TokenSet(Sequence[Tokens]):
    """Samples in the order of their file. Reading one touches its own tokens only, `lengths` and `target_counts` none."""

    ids: np.ndarray
    """int32 [tokens]: those of all samples, one sample after the other. May be mapped, and is then read-only."""
    targets: np.ndarray
    """bool [tokens]: the model is trained to produce this token."""
    begins: np.ndarray
    """int64 [samples]: the place of each sample's first token. What lies between two samples was cut away."""
    lengths: np.ndarray
    """int64 [samples]: tokens of each."""
    target_counts: np.ndarray
    """int64 [samples]: targets of each that something predicts (Tokens.target_count)."""
    largest_id: int
    """No sample had a larger token id before it was cut; -1: there were no tokens."""
    digest: str
    """Of all samples, uncut (TokensDigest): equal digests are equal tokens and targets."""
    dated: bool = False
    """The chat template may write the date, so that other tokens are made tomorrow."""

    @classmethod
    def of(cls, samples: Iterable[Tokens], *, dated: bool = False) -> TokenSet:
        """The samples, copied into memory."""
        digest = TokensDigest()
        given = [digest.add(sample) for sample in samples]
        lengths = np.array([len(sample.ids) for sample in given], dtype=np.int64)
        ids = np.concatenate([np.empty(0, np.int32), *(sample.ids for sample in given)], dtype=np.int32)
        return cls(
            ids=ids,
            targets=np.concatenate([np.empty(0, np.bool_), *(sample.targets for sample in given)]),
            begins=np.cumsum(lengths) - lengths,
            lengths=lengths,
            target_counts=np.array([sample.target_count for sample in given], dtype=np.int64),
            largest_id=int(ids.max(initial=-1)),
            digest=digest.hexdigest(),
            dated=dated,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Tokens: ...
    @overload
    def __getitem__(self, index: slice) -> TokenSet: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Tokens | TokenSet:
        """A sample, copied: its arrays are the caller's own. A slice: a set of these samples, which copies no token."""
        if isinstance(index, slice):
            return self.some(index)
        begin, length = int(self.begins[index]), int(self.lengths[index])
        return Tokens(self.ids[begin : begin + length].copy(), self.targets[begin : begin + length].copy())

    def cut(self, max_length: int, *, pairs: bool = False) -> TokenSet:
        """The samples as training takes them: the first `max_length` tokens of each; those left without a target are dropped.

        `pairs`: each two samples stay together: both are dropped where one is left without. Copies no token. Reads the targets
        of the samples that lose tokens, and nothing else.
        """
        counts = self.targets_within(max_length)
        cut = replace(self, lengths=np.minimum(self.lengths, max_length), target_counts=counts)
        kept = counts > 0
        if pairs:
            kept = kept.reshape(-1, 2).all(axis=1).repeat(2)
        return cut if kept.all() else cut.some(kept)

    def targets_within(self, max_length: int) -> np.ndarray:
        """int64 [samples]: the targets that each has once it is cut."""
        longer = np.flatnonzero(self.lengths > max_length)
        if not len(longer):
            return self.target_counts
        counts = self.target_counts.copy()
        for index in longer:
            begin = int(self.begins[index])
            counts[index] = np.count_nonzero(self.targets[begin + 1 : begin + max_length])
        return counts

    def some(self, which: slice | np.ndarray) -> TokenSet:
        """The chosen samples, of which no token is copied. `which`: a slice, or bool [samples]."""
        return replace(self, begins=self.begins[which], lengths=self.lengths[which], target_counts=self.target_counts[which])


class TokensDigest:
    """A SHA-256 over tokens, targets and where samples begin."""

    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(3)]

    def add(self, sample: Tokens) -> Tokens:
        """Count the sample in. Returns it."""
        arrays = (sample.ids.astype("<i4", copy=False), sample.targets, np.array([len(sample.ids)], "<i8"))
        for part, array in zip(self._parts, arrays, strict=True):
            part.update(array.tobytes())
        return sample

    def hexdigest(self) -> str:
        return self.combined(self._parts)

    @staticmethod
    def combined(parts: Sequence[hashlib._Hash]) -> str:
        """The digest by those of all ids (int32), all targets (a byte each) and all lengths (int64)."""
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()
