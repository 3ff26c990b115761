"""The samples of a data file as flat arrays, in memory or mapped from files, without a Python
object for each sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import SupportsIndex, overload

import numpy as np

from ft_service.data.statistics import Lines
from ft_service.data.tokens.sample import Tokens


@dataclass(frozen=True, eq=False)
class TokenSet(Sequence[Tokens]):
    """Samples in the order of their file.

    Reading a sample reads only its own tokens; `lengths` and `target_counts` read none.
    """

    ids: np.ndarray
    """int32 [tokens]: the ids of all samples, one after the other. Read-only if mapped."""
    targets: np.ndarray
    """bool [tokens]: the model is trained to produce this token."""
    begins: np.ndarray
    """int64 [samples]: the place of each sample's first token.

    Tokens between two samples were cut.
    """
    lengths: np.ndarray
    """int64 [samples]: the number of tokens of each sample."""
    target_counts: np.ndarray
    """int64 [samples]: the number of predicted targets of each sample (Tokens.target_count)."""
    records: np.ndarray
    """int64 [samples]: the number of the file's record that each sample is of, from 0."""
    largest_id: int
    """The largest token id of the uncut samples; -1: there are no tokens."""
    digest: str
    """Digest of all uncut samples (TokensDigest): equal digests mean equal tokens and targets."""
    dated: bool = False
    """The chat template may write the date, so tomorrow's tokens may differ."""
    unread_names: Mapping[str, Lines] = field(default_factory=dict)
    """Role → records of the file with names of participants of this role, which the chat template
    does not write.
    """
    unanswered: Lines = field(default_factory=Lines)
    """Records of the file with messages after the last answer."""

    @classmethod
    def of(cls, samples: Iterable[Tokens], *, dated: bool = False) -> TokenSet:
        """A set with copies of the samples."""
        digest = TokensDigest()
        given = [digest.add(sample) for sample in samples]
        lengths = np.array([len(sample.ids) for sample in given], dtype=np.int64)
        ids = np.concatenate(
            [np.empty(0, np.int32), *(sample.ids for sample in given)], dtype=np.int32
        )
        return cls(
            ids=ids,
            targets=np.concatenate([np.empty(0, np.bool_), *(sample.targets for sample in given)]),
            begins=np.cumsum(lengths) - lengths,
            lengths=lengths,
            target_counts=np.array([sample.target_count for sample in given], dtype=np.int64),
            records=np.cumsum([not sample.continues for sample in given], dtype=np.int64) - 1,
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
        """A copy of a sample; for a slice, a set of these samples without copies."""
        if isinstance(index, slice):
            return self.some(index)
        begin = int(self.begins[index])
        length = int(self.lengths[index])
        return Tokens(
            self.ids[begin : begin + length].copy(), self.targets[begin : begin + length].copy()
        )

    def cut(self, max_length: int, *, pairs: bool = False, alike: bool = False) -> TokenSet:
        """The samples for training: the first `max_length` tokens of each; samples that are left
        without a target are dropped.

        `pairs`: both samples of a pair are dropped if one is left without a target, or if they are
        the same then; `alike`: the latter are kept. Copies no tokens, and reads only the targets of
        the samples that are cut, and the tokens of equally long answers.
        """
        counts = self.targets_within(max_length)
        cut = replace(self, lengths=np.minimum(self.lengths, max_length), target_counts=counts)
        kept = counts > 0
        if pairs:
            of_pairs = kept.reshape(-1, 2).all(axis=1)
            kept = (of_pairs if alike else of_pairs & ~self.alike(max_length)).repeat(2)
        return cut if kept.all() else cut.some(kept)

    def alike(self, max_length: int) -> np.ndarray:
        """bool [pairs]: whether the two samples of each pair are the same after the cut, and have
        targets left. Reads only those that are equally long then.
        """
        counts = self.targets_within(max_length).reshape(-1, 2)
        lengths = np.minimum(self.lengths, max_length).reshape(-1, 2)
        alike = (
            (counts[:, 0] > 0) & (counts[:, 0] == counts[:, 1]) & (lengths[:, 0] == lengths[:, 1])
        )
        for pair in np.flatnonzero(alike):
            alike[pair] = self[2 * pair].cut(max_length).is_same(self[2 * pair + 1].cut(max_length))
        return alike

    def targets_within(self, max_length: int) -> np.ndarray:
        """int64 [samples]: the number of targets of each sample after the cut."""
        longer = np.flatnonzero(self.lengths > max_length)
        if not len(longer):
            return self.target_counts
        counts = self.target_counts.copy()
        for index in longer:
            begin = int(self.begins[index])
            counts[index] = np.count_nonzero(self.targets[begin + 1 : begin + max_length])
        return counts

    def some(self, which: slice | np.ndarray) -> TokenSet:
        """A set of the chosen samples, without copies. `which`: a slice, or bool [samples]."""
        names = ("begins", "lengths", "target_counts", "records")
        return replace(self, **{name: getattr(self, name)[which] for name in names})


class TokensDigest:
    """A SHA-256 of tokens, targets and lengths of samples."""

    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(3)]

    def add(self, sample: Tokens) -> Tokens:
        """Add the sample, and return it."""
        arrays = (
            sample.ids.astype("<i4", copy=False),
            sample.targets,
            np.array([len(sample.ids)], "<i8"),
        )
        for part, array in zip(self._parts, arrays, strict=True):
            part.update(array.tobytes())
        return sample

    def hexdigest(self) -> str:
        return self.combined(self._parts)

    @staticmethod
    def combined(parts: Sequence[hashlib._Hash]) -> str:
        """The digest from the hashes of all ids (int32), all targets (one byte each) and all
        lengths (int64).
        """
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()
