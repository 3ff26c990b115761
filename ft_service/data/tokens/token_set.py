"""The samples of a data file as flat arrays, in memory or mapped from files, without a Python
object for each sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike

from ft_service.data.fault_groups import Skipped
from ft_service.data.sample_kinds import DETAILS, Picture
from ft_service.data.statistics import Lines
from ft_service.data.tokens.sample import ImageUse, Tokens

KEY_BYTES = 32


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a set, each once, in the order of their first use."""

    data: np.ndarray
    """uint8 [bytes]: the encoded pictures, one after the other."""
    offsets: np.ndarray
    """int64 [pictures + 1]: the place of each one's first byte, and the end of the last."""
    digests: np.ndarray
    """uint8 [pictures, KEY_BYTES]: their keys."""
    details: np.ndarray
    """uint8 [pictures]: the place of each one's detail in DETAILS."""

    @classmethod
    def of(cls, pictures: Sequence[Picture]) -> Pictures:
        sizes = np.array([0, *(len(picture.data) for picture in pictures)], np.int64)
        keys = b"".join(bytes.fromhex(picture.key) for picture in pictures)
        details = [DETAILS.index(picture.detail) for picture in pictures]
        return cls(
            np.frombuffer(b"".join(picture.data for picture in pictures), np.uint8),
            np.cumsum(sizes),
            np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES),
            np.array(details, np.uint8),
        )

    def __len__(self) -> int:
        return len(self.details)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        return tuple(digest.tobytes().hex() for digest in self.digests)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.keys)}

    def __getitem__(self, key: str) -> Picture:
        """A copy of the picture with this key."""
        return self.at(self._numbers[key])

    def at(self, number: int) -> Picture:
        """A copy of a picture, by its place."""
        begin, end = self.offsets[number : number + 2].tolist()
        detail = DETAILS[self.details[number]]
        return Picture(self.keys[number], self.data[begin:end].tobytes(), detail)


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
    pictures: Pictures | None = None
    """All pictures of the file. None: it has none."""
    uses: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """int64 [uses, 3]: where the file's samples hold pictures, in their order: the places of the
    first token and of that behind the last one in `ids`, and the picture's place in `pictures`."""
    labels: np.ndarray | None = None
    """bool [samples]: whether the answer is a good one. None: the file has no labels."""
    skipped: Skipped = field(default_factory=Skipped)
    """Lines of the file that are left out, and have no number in `records`."""

    @classmethod
    def of(cls, samples: Iterable[Tokens], *, dated: bool = False) -> TokenSet:
        """A set with copies of the samples."""
        digest = TokensDigest()
        given = [digest.add(sample) for sample in samples]
        noted = ImageNotes()
        pictures = [picture for sample in given for picture in noted.add(sample)]
        lengths = np.array([len(sample.ids) for sample in given], dtype=np.int64)
        labels = [sample.label for sample in given]
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
            pictures=Pictures.of(pictures) if pictures else None,
            uses=np.array(noted.uses, np.int64).reshape(-1, 3),
            labels=np.array(labels, np.bool_) if given and None not in labels else None,
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
            self.ids[begin : begin + length].copy(),
            self.targets[begin : begin + length].copy(),
            images=self._images_within(begin, begin + length),
            label=None if self.labels is None else bool(self.labels[index]),
        )

    def uses_within(self, begin: int, end: int) -> list[list[int]]:
        """The rows of `uses` between two places in `ids`."""
        if not len(self.uses):
            return []
        first = int(np.searchsorted(self.uses[:, 0], begin))
        last = int(np.searchsorted(self.uses[:, 1], end, side="right"))
        return self.uses[first:last].tolist()

    def _images_within(self, begin: int, end: int) -> tuple[ImageUse, ...]:
        if self.pictures is None:
            return ()
        return tuple(
            ImageUse(place - begin, until - begin, self.pictures.at(number))
            for place, until, number in self.uses_within(begin, end)
        )

    def cut(self, max_length: int, *, pairs: bool = False, alike: bool = False) -> TokenSet:
        """The samples for training: the first `max_length` tokens of each; samples that are left
        without a target are dropped.

        `pairs`: both samples of a pair are dropped if one is left without a target, or if they are
        the same then; `alike`: the latter are kept. Copies no tokens, and reads only the targets of
        the samples that are cut, and the tokens of equally long answers.
        """
        counts = self.targets_within(max_length)
        cut = replace(self, lengths=self.lengths_within(max_length), target_counts=counts)
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
        lengths = self.lengths_within(max_length).reshape(-1, 2)
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
        lengths = self.lengths_within(max_length)
        for index in longer:
            begin = int(self.begins[index])
            counts[index] = np.count_nonzero(self.targets[begin + 1 : begin + lengths[index]])
        return counts

    def lengths_within(self, max_length: int) -> np.ndarray:
        """int64 [samples]: the number of tokens of each sample after the cut, which is before an
        image that it would go through.
        """
        lengths = np.minimum(self.lengths, min(max_length, int(self.lengths.max(initial=0))))
        if len(self.uses):
            ends = self.begins + lengths
            before = np.searchsorted(self.uses[:, 0], ends) - 1
            crossed = (before >= 0) & (self.uses[before, 1] > ends)
            lengths = np.where(crossed, self.uses[before, 0] - self.begins, lengths)
        return lengths

    def some(self, which: slice | np.ndarray) -> TokenSet:
        """A set of the chosen samples, without copies. `which`: a slice, or bool [samples]."""
        names = ["begins", "lengths", "target_counts", "records"]
        names += [] if self.labels is None else ["labels"]
        return replace(self, **{name: getattr(self, name)[which] for name in names})


def line_numbers(records: ArrayLike, skipped: Sequence[int]) -> np.ndarray:
    """int64, as many: numbers of records in their file, from 1.

    `records`: their numbers among those that are not skipped, from 0. `skipped`: numbers of the
    skipped ones in the file, from 1, in their order.
    """
    numbers = np.asarray(records, np.int64)
    before = np.asarray(skipped, np.int64) - 1 - np.arange(len(skipped))
    return numbers + 1 + np.searchsorted(before, numbers, side="right")


class TokensDigest:
    """A SHA-256 of tokens, targets and lengths of samples."""

    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(3)]
        self._images = hashlib.sha256()
        self._has_images = False
        self._labels = hashlib.sha256()
        self._has_labels = False
        self._tokens = 0

    def add(self, sample: Tokens) -> Tokens:
        """Add the sample, and return it."""
        arrays = (
            sample.ids.astype("<i4", copy=False),
            sample.targets,
            np.array([len(sample.ids)], "<i8"),
        )
        for part, array in zip(self._parts, arrays, strict=True):
            part.update(array.tobytes())
        for use in sample.images:
            self._images.update(
                hashed_use(use.begin + self._tokens, use.end + self._tokens, use.picture.key)
            )
            self._has_images = True
        if sample.label is not None:
            self._labels.update(bytes([sample.label]))
            self._has_labels = True
        self._tokens += len(sample.ids)
        return sample

    def hexdigest(self) -> str:
        images = [self._images] if self._has_images else []
        labels = [self._labels] if self._has_labels else []
        return self.combined([*self._parts, *images, *labels])

    @staticmethod
    def combined(parts: Sequence[hashlib._Hash]) -> str:
        """The digest from the hashes of all ids (int32), all targets (one byte each), all lengths
        (int64), where there are images, of their places and keys (hashed_use), and, where there are
        labels, of all labels (one byte each).
        """
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()


def hashed_use(begin: int, end: int, key: str) -> bytes:
    """The bytes of an image's places in `ids` and its key, for a digest."""
    return np.array([begin, end], "<i8").tobytes() + bytes.fromhex(key)


class ImageNotes:
    """The pictures of samples that follow each other, and where they are used."""

    def __init__(self) -> None:
        self.uses: list[tuple[int, int, int]] = []
        """As of TokenSet."""
        self._tokens = 0
        self._numbers: dict[str, int] = {}

    def add(self, sample: Tokens) -> list[Picture]:
        """Note a sample's images, and return its pictures that no earlier one has."""
        new: list[Picture] = []
        for use in sample.images:
            key = use.picture.key
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers)
                new.append(use.picture)
            begin, end = use.begin + self._tokens, use.end + self._tokens
            self.uses.append((begin, end, self._numbers[key]))
        self._tokens += len(sample.ids)
        return new
