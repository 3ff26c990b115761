"""Token sets as folders: flat arrays that are mapped, and an index with which they must agree.

    ids.bin             int32 [tokens]; all files are little-endian
    targets.bin         uint8 [tokens], 0 or 1
    offsets.bin         int64 [samples + 1]: the place of each sample's first token, and the end of
                        the last
    target_counts.bin   int64 [samples]
    records.bin         int64 [samples]: the number of each sample's record, from 0
    index.json          TokenSetIndex, written last

Where samples have images, also:

    images.bin          the encoded pictures, each once
    image_offsets.bin   int64 [pictures + 1]: the place of each one's first byte, and the end of
                        the last
    image_keys.bin      uint8 [pictures, 32]
    image_details.bin   uint8 [pictures]: places in DETAILS
    image_uses.bin      int64 [uses, 3]: TokenSet.uses

Where samples have labels, also:

    labels.bin          uint8 [samples], 0 or 1

A folder is written under a temporary name and published by a rename
(ft_service/bases/cache_folder.py). A folder whose files do not agree with its index is not a token
set.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ft_service.bases.cache_folder import INDEX
from ft_service.data.fault_groups import Skipped
from ft_service.data.sample_kinds import DETAILS, Picture
from ft_service.data.statistics import Lines
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import (
    KEY_BYTES,
    ImageNotes,
    Pictures,
    TokensDigest,
    TokenSet,
    hashed_use,
)

FORMAT = 2
"""Version of this format."""
CHUNK_BYTES = 16 * 1024**2
_OF_SAMPLES = ("target_counts.bin", "records.bin")
_DTYPES = {
    "ids.bin": "<i4",
    "targets.bin": "?",
    "offsets.bin": "<i8",
    **dict.fromkeys(_OF_SAMPLES, "<i8"),
}
_IMAGE_DTYPES = {
    "images.bin": "u1",
    "image_offsets.bin": "<i8",
    "image_keys.bin": "u1",
    "image_details.bin": "u1",
    "image_uses.bin": "<i8",
}


_LABELS = "labels.bin"
_OTHER_DTYPES = {**_IMAGE_DTYPES, _LABELS: "?"}


class ImagesIndex(BaseModel):
    """The index of a folder's images."""

    model_config = ConfigDict(frozen=True)

    pictures: int
    bytes: int
    """Of all encoded pictures."""
    uses: int

    @property
    def lengths(self) -> dict[str, int]:
        """File name → number of elements."""
        return {
            "images.bin": self.bytes,
            "image_offsets.bin": self.pictures + 1,
            "image_keys.bin": self.pictures * KEY_BYTES,
            "image_details.bin": self.pictures,
            "image_uses.bin": self.uses * 3,
        }


class TokenSetIndex(BaseModel):
    """The index of a folder."""

    model_config = ConfigDict(frozen=True)

    format: int = FORMAT
    samples: int
    tokens: int
    largest_id: int
    """-1: there are no tokens."""
    digest: str
    """Digest of the samples (TokensDigest)."""
    records: str
    """SHA-256 of records.bin."""
    dated: bool
    """The chat template may write the date, so tomorrow's tokens may differ."""
    unread_names: Mapping[str, Lines] = Field(default_factory=dict)
    unanswered: Lines = Field(default_factory=Lines)
    """Both are those of the TokenSet."""
    images: ImagesIndex | None = None
    """None, and not written: there are none."""
    labelled: bool = False
    """Whether samples have labels. False is not written."""
    skipped: Skipped = Field(default_factory=Skipped)
    """That of the TokenSet. None at all are not written."""
    seal: str = ""
    """SHA-256 of all fields above; `unread_names`, `unanswered`, `images`, `labelled` and `skipped`
    only if there are some, since earlier releases wrote none."""

    def sealed(self) -> TokenSetIndex:
        return self.model_copy(update={"seal": self._seal()})

    @property
    def is_whole(self) -> bool:
        return self.format == FORMAT and self.seal == self._seal()

    @property
    def lengths(self) -> dict[str, int]:
        """File name → number of elements."""
        samples = self.samples
        tokens = self.tokens
        return {
            "ids.bin": tokens,
            "targets.bin": tokens,
            "offsets.bin": samples + 1,
            **dict.fromkeys(_OF_SAMPLES, samples),
            **(self.images.lengths if self.images is not None else {}),
            **({_LABELS: samples} if self.labelled else {}),
        }

    @property
    def written(self) -> str:
        """The text of the file."""
        given = {
            "images": self.images is not None,
            "labelled": self.labelled,
            "skipped": bool(self.skipped),
        }
        left_out = {name for name, is_given in given.items() if not is_given}
        return self.model_dump_json(indent=2, exclude=left_out)

    def _seal(self) -> str:
        given = {
            "unread_names": bool(self.unread_names),
            "unanswered": self.unanswered.count > 0,
            "images": self.images is not None,
            "labelled": self.labelled,
            "skipped": bool(self.skipped),
        }
        left_out = {"seal", *(name for name, is_given in given.items() if not is_given)}
        return hashlib.sha256(self.model_dump_json(exclude=left_out).encode()).hexdigest()


class TokenSetWriter:
    """Writes samples into a folder, in memory bounded by the longest sample. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        """`folder`: an existing folder; files of these names are overwritten."""
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()
        self._digest = TokensDigest()
        self._records = hashlib.sha256()
        self._tokens = self._samples = 0
        self._largest = self._record = -1
        self._notes = ImageNotes()
        self._pictures = self._picture_bytes = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in _DTYPES:
                self._files[name] = stack.enter_context((self._folder / name).open("wb"))
            self._files["offsets.bin"].write(_int64(0))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add(self, sample: Tokens) -> None:
        self._digest.add(sample)
        self._tokens += len(sample.ids)
        self._samples += 1
        self._largest = max(self._largest, int(sample.ids.max(initial=-1)))
        self._files["ids.bin"].write(sample.ids.astype("<i4", copy=False).tobytes())
        self._files["targets.bin"].write(sample.targets.tobytes())
        self._files["offsets.bin"].write(_int64(self._tokens))
        self._files["target_counts.bin"].write(_int64(sample.target_count))
        self._record += not sample.continues
        record = _int64(self._record)
        self._records.update(record)
        self._files["records.bin"].write(record)
        if sample.label is not None:
            self._add_label(sample.label)
        uses = len(self._notes.uses)
        for picture in self._notes.add(sample):
            self._add_picture(picture)
        for use in self._notes.uses[uses:]:
            self._files["image_uses.bin"].write(b"".join(map(_int64, use)))

    def _add_label(self, label: bool) -> None:
        if _LABELS not in self._files:
            file = (self._folder / _LABELS).open("wb")
            self._files[_LABELS] = self._stack.enter_context(file)
        self._files[_LABELS].write(bytes([label]))

    def _add_picture(self, picture: Picture) -> None:
        if not self._pictures:
            for name in _IMAGE_DTYPES:
                file = self._stack.enter_context((self._folder / name).open("wb"))
                self._files[name] = file
            self._files["image_offsets.bin"].write(_int64(0))
        self._pictures += 1
        self._picture_bytes += len(picture.data)
        self._files["images.bin"].write(picture.data)
        self._files["image_offsets.bin"].write(_int64(self._picture_bytes))
        self._files["image_keys.bin"].write(bytes.fromhex(picture.key))
        self._files["image_details.bin"].write(bytes([DETAILS.index(picture.detail)]))

    def finish(
        self,
        *,
        dated: bool,
        unread_names: Mapping[str, Lines] | None = None,
        unanswered: Lines | None = None,
        skipped: Skipped | None = None,
    ) -> None:
        """Write all samples to the disk and then the index, which makes the folder complete."""
        for file in self._files.values():
            _onto_disk(file)
        index = TokenSetIndex(
            samples=self._samples,
            tokens=self._tokens,
            largest_id=self._largest,
            digest=self._digest.hexdigest(),
            records=self._records.hexdigest(),
            dated=dated,
            unread_names=unread_names or {},
            unanswered=unanswered or Lines(),
            images=ImagesIndex(
                pictures=self._pictures, bytes=self._picture_bytes, uses=len(self._notes.uses)
            )
            if self._pictures
            else None,
            labelled=_LABELS in self._files,
            skipped=skipped or Skipped(),
        ).sealed()
        with (self._folder / INDEX).open("wb") as file:
            file.write(index.written.encode() + b"\n")
            _onto_disk(file)


def open_token_set(folder: Path) -> TokenSet | None:
    """The samples of a folder, mapped without reading tokens.

    None: it does not hold a complete set.
    """
    try:
        index = TokenSetIndex.model_validate_json((folder / INDEX).read_bytes())
        if not index.is_whole:
            return None
        arrays = {name: _mapped(folder / name, count) for name, count in index.lengths.items()}
    except (OSError, ValidationError, ValueError):
        return None
    offsets = arrays["offsets.bin"]
    counts = arrays["target_counts.bin"]
    lengths = np.diff(offsets)
    ordered = offsets[0] == 0 and offsets[-1] == index.tokens and bool((lengths >= 0).all())
    if not ordered or not bool(((counts >= 0) & (counts <= lengths)).all()):
        return None
    uses = _uses_of(arrays, index.tokens)
    if uses is None:
        return None
    return TokenSet(
        ids=arrays["ids.bin"],
        targets=arrays["targets.bin"],
        begins=offsets[:-1],
        lengths=lengths,
        target_counts=counts,
        records=arrays["records.bin"],
        largest_id=index.largest_id,
        digest=index.digest,
        dated=index.dated,
        unread_names=index.unread_names,
        unanswered=index.unanswered,
        pictures=None if index.images is None else _pictures_of(arrays),
        uses=uses,
        labels=arrays.get(_LABELS),
        skipped=index.skipped,
    )


def _pictures_of(arrays: Mapping[str, np.ndarray]) -> Pictures:
    return Pictures(
        arrays["images.bin"],
        arrays["image_offsets.bin"],
        arrays["image_keys.bin"].reshape(-1, KEY_BYTES),
        arrays["image_details.bin"],
    )


def _uses_of(arrays: Mapping[str, np.ndarray], tokens: int) -> np.ndarray | None:
    """TokenSet.uses. None: they are not in order, or of no pictures."""
    if "images.bin" not in arrays:
        return np.empty((0, 3), np.int64)
    offsets = arrays["image_offsets.bin"]
    details = arrays["image_details.bin"]
    uses = arrays["image_uses.bin"].reshape(-1, 3)
    edges = np.concatenate([[0], uses[:, :2].reshape(-1), [tokens]])
    numbers = uses[:, 2]
    is_whole = (
        bool((np.diff(edges) >= 0).all())
        and bool(((numbers >= 0) & (numbers < len(details))).all())
        and bool((details < len(DETAILS)).all())
        and offsets[0] == 0
        and offsets[-1] == len(arrays["images.bin"])
        and bool((np.diff(offsets) >= 0).all())
    )
    return uses if is_whole else None


def damage(folder: Path) -> Generator[None, None, str | None]:
    """Read all files of a complete set, and return the damage as text that follows its name; None:
    it is not damaged.

    Yields after each CHUNK_BYTES, since reading takes some seconds for each billion tokens.
    """
    try:
        index = TokenSetIndex.model_validate_json((folder / INDEX).read_bytes())
        offsets = np.fromfile(folder / "offsets.bin", "<i8")
        counts = np.fromfile(folder / "target_counts.bin", "<i8")
        parts = [hashlib.sha256() for _ in range(2)]
        marked = 0
        for name, part in zip(("ids.bin", "targets.bin"), parts, strict=True):
            with (folder / name).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    part.update(chunk)
                    if name == "targets.bin":
                        marked += int(np.count_nonzero(np.frombuffer(chunk, np.uint8)))
                    yield
        firsts = offsets[:-1][np.diff(offsets) > 0]
        targets = _mapped(folder / "targets.bin", index.tokens)
        records = hashlib.sha256((folder / "records.bin").read_bytes()).hexdigest()
        images = yield from _hashed_images(folder, index)
        labels = [hashlib.sha256((folder / _LABELS).read_bytes())] if index.labelled else []
        predicted = marked - int(np.count_nonzero(targets[firsts]))
    except (OSError, ValueError, IndexError) as error:
        return f"cannot be read: {error}"
    lengths = hashlib.sha256(np.diff(offsets).tobytes())
    if TokensDigest.combined([*parts, lengths, *images, *labels]) != index.digest:
        return "have another digest than when they were written"
    if records != index.records:
        return "are of other records than when they were written"
    return (
        None
        if predicted == int(counts.sum())
        else "have other counts of targets than when they were written"
    )


def _hashed_images(
    folder: Path, index: TokenSetIndex
) -> Generator[None, None, list[hashlib._Hash]]:
    """The part of a set's digest that its images make, none if it has none.

    Yields after each picture. Raises ValueError for a picture with another key than its bytes give,
    OSError.
    """
    if index.images is None:
        return []
    arrays = {name: _mapped(folder / name, count) for name, count in index.images.lengths.items()}
    uses = _uses_of(arrays, index.tokens)
    if uses is None:
        raise ValueError("the places of its images are not in order")
    pictures = _pictures_of(arrays)
    for number in range(len(pictures)):
        picture = pictures.at(number)
        if Picture.of(picture.data, picture.detail) != picture:
            raise ValueError(f"image {number} is another one than when it was written")
        yield
    part = hashlib.sha256()
    for begin, end, number in uses.tolist():
        part.update(hashed_use(begin, end, pictures.keys[number]))
    return [part]


def _mapped(path: Path, count: int) -> np.ndarray:
    """A file of `count` elements, mapped read-only.

    Raises ValueError if its size is another one, OSError.
    """
    dtype = np.dtype((_DTYPES | _OTHER_DTYPES)[path.name])
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path} has not {count} elements")
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,)))


def _int64(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _onto_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
