"""Token sets as folders: flat arrays that are mapped, and an index with which they must agree.

    ids.bin             int32 [tokens]; all files are little-endian
    targets.bin         uint8 [tokens], 0 or 1
    offsets.bin         int64 [samples + 1]: the place of each sample's first token, and the end of
                        the last
    target_counts.bin   int64 [samples]
    records.bin         int64 [samples]: the number of each sample's record, from 0
    index.json          TokenSetIndex, written last

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
from ft_service.data.statistics import Lines
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokensDigest, TokenSet

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
    seal: str = ""
    """SHA-256 of all fields above; `unread_names` and `unanswered` only if there are some, since
    earlier releases wrote none."""

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
        }

    def _seal(self) -> str:
        given = {"unread_names": bool(self.unread_names), "unanswered": self.unanswered.count > 0}
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

    def finish(
        self,
        *,
        dated: bool,
        unread_names: Mapping[str, Lines] | None = None,
        unanswered: Lines | None = None,
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
        ).sealed()
        with (self._folder / INDEX).open("wb") as file:
            file.write(index.model_dump_json(indent=2).encode() + b"\n")
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
    )


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
        predicted = marked - int(np.count_nonzero(targets[firsts]))
    except (OSError, ValueError, IndexError) as error:
        return f"cannot be read: {error}"
    if TokensDigest.combined([*parts, hashlib.sha256(np.diff(offsets).tobytes())]) != index.digest:
        return "have another digest than when they were written"
    if records != index.records:
        return "are of other records than when they were written"
    return (
        None
        if predicted == int(counts.sum())
        else "have other counts of targets than when they were written"
    )


def _mapped(path: Path, count: int) -> np.ndarray:
    """A file of `count` elements, mapped read-only.

    Raises ValueError if its size is another one, OSError.
    """
    dtype = np.dtype(_DTYPES[path.name])
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
