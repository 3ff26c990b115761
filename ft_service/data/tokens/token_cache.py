"""Token sets in a folder, by key: looked up, or recorded while a file is read.

Safe for concurrent processes.

The key is made of everything that determines a data file's tokens. No tokenizer is loaded for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jinja2
import PIL
import tokenizers
import transformers

from ft_service.bases.base_files import is_base_file
from ft_service.bases.cache_folder import INDEX, LOCK, Cache, CacheEntry
from ft_service.data.data_file import PAIRING
from ft_service.data.fault_groups import Skipped
from ft_service.data.statistics import Lines
from ft_service.data.token_folder import entry_key
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokenizer_files import IMAGE_FILES, stops_of, tokenizer_files
from ft_service.data.tokens.chat_template import CLOCK
from ft_service.data.tokens.image_processor import DECODING
from ft_service.data.tokens.render import RENDERING
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.token_set_files import FORMAT, TokenSetWriter, open_token_set
from ft_service.host import disk
from ft_service.rundir.directory import sha256_of

BYTES_OF_TEXT = 2.0
"""Approximate bytes stored for each byte of a data file, to make room before writing."""
_WITH_TEMPLATE = ("tokenizer_config.json", "chat_template.json")


def tokens_key(
    model_path: str, sha256: str, options: TokenOptions = DEFAULT, *, pairs: bool = False
) -> str:
    """The key of a data file's token set for a base.

    `sha256`: the data file's; `pairs`: it holds pairs of answers. Raises OSError.

    training.max_length is not part of the key, since samples are stored uncut.
    """
    return entry_key(sha256, tokenizing_digest(model_path, options, pairs=pairs))


def tokenizing_digest(
    model_path: str, options: TokenOptions = DEFAULT, *, pairs: bool = False
) -> str:
    """A digest of the tokenizer's files (chat templates included), of those of a base's image
    processor, of the version of the code and libraries that use them, and of the job's options; of
    the date only if a template may write it.
    """
    folder = Path(model_path)
    files = tokenizer_files(folder)
    given = options.given()
    if not may_write_date(files, options.chat_template):
        given.pop("date", None)
    how: dict[str, Any] = {
        "files": {path.relative_to(folder).as_posix(): sha256_of(path) for path in files},
        "stops": sorted(stops_of(folder)),
        "format": FORMAT,
        "rendering": RENDERING,
        "libraries": [transformers.__version__, tokenizers.__version__, jinja2.__version__],
        **({"options": given} if given else {}),
    }
    if images := [folder / name for name in IMAGE_FILES if is_base_file(folder / name)]:
        how["images"] = {path.name: sha256_of(path) for path in images}
        how["image processing"] = [DECODING, PIL.__version__]
    if pairs:
        how["pairs"] = PAIRING
    return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:40]


def may_write_date(files: Sequence[Path], chat_template: str) -> bool:
    """Return whether the chat template may write the date.

    `files`: the tokenizer's. `chat_template`: the job's; empty: the base's.
    """
    if chat_template:
        return CLOCK in chat_template
    return any(
        CLOCK.encode() in path.read_bytes()
        for path in files
        if path.suffix == ".jinja" or path.name in _WITH_TEMPLATE
    )


@dataclass(frozen=True)
class FoundTokenSet:
    """A token set that is not removed before its entry is closed or this process ends."""

    samples: TokenSet
    entry: CacheEntry


def find(folder: Path | None, key: str) -> FoundTokenSet | None:
    """The token set of a key, with its time of last use updated. None: there is no complete one."""
    entry = Cache(folder).find(key) if folder is not None else None
    if entry is None:
        return None
    samples = open_token_set(entry.folder)
    if samples is None:
        entry.close()
        return None
    return FoundTokenSet(samples, entry)


def unkept(folder: Path, error: OSError | None) -> str:
    """The reason why a file's tokens could not be kept, as text that follows the file's name.

    `folder`: that of the token sets.
    """
    if error is None:
        return f"its tokens were written to {folder}, and are not there."
    if error.errno in disk.NO_LOCKS:
        return (
            f"its tokens cannot be kept: the file system of {folder} has no locks "
            f"({error.strerror}). Have FT_TOKENS name a "
            "folder on one that has."
        )
    if error.errno in disk.NO_ROOM:
        return (
            f"its tokens find no room: {disk.no_room(folder, error)} ({error.strerror}; they "
            "take half of the disk at most.)"
        )
    return f"its tokens cannot be kept in {folder}: {error.strerror or error}."


class Recording:
    """A token set that is written sample by sample and appears in the folder when it is published.

    An OSError ends the recording; it is not raised but stored in `error`.
    """

    def __init__(self, cache: Cache, key: str, data_bytes: int) -> None:
        """`data_bytes`: size of the data file."""
        self._cache = cache
        self._key = key
        self._size = int(data_bytes * BYTES_OF_TEXT)
        self._staged: CacheEntry | None = None
        self._writer: TokenSetWriter | None = None
        self.error: OSError | None = None

    def __enter__(self) -> Self:
        try:
            remove_damaged(self._cache, self._key)
            self._staged = self._cache.stage(self._size)
            if self._staged is None:
                raise OSError(
                    errno.ENOSPC, f"about {self._size:,} bytes are needed", str(self._cache.folder)
                )
            self._writer = TokenSetWriter(self._staged.folder).__enter__()
        except OSError as error:
            self._failed(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def add(self, sample: Tokens) -> None:
        if self._writer is not None:
            try:
                self._writer.add(sample)
            except OSError as error:
                self._failed(error)

    def publish(
        self,
        *,
        dated: bool,
        unread_names: Mapping[str, Lines] | None = None,
        unanswered: Lines | None = None,
        skipped: Skipped | None = None,
    ) -> None:
        """Make the recorded token set the entry of the key, unless there is one already.

        All are fields of the TokenSet.
        """
        if self._writer is None or self._staged is None:
            return
        try:
            self._writer.finish(
                dated=dated, unread_names=unread_names, unanswered=unanswered, skipped=skipped
            )
            self._close_writer()
        except OSError as error:
            self._failed(error)
            return
        staged = self._staged
        self._staged = None
        self._cache.publish(staged, self._key)

    def stop(self) -> None:
        """Discard what was not published."""
        with contextlib.suppress(OSError):
            self._close_writer()
        if self._staged is not None:
            self._cache.discard(self._staged)
            self._staged = None

    def _close_writer(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.__exit__(None, None, None)

    def _failed(self, error: OSError) -> None:
        self.error = error
        self.stop()


def remove_damaged(cache: Cache, key: str) -> None:
    """Remove an entry that is not a complete token set."""
    folder = cache.folder / key
    if not folder.exists():
        return
    found = find(cache.folder, key)
    if found is not None:
        found.entry.close()
        return
    try:
        last_use = (folder / INDEX).stat().st_mtime_ns
    except OSError:
        last_use = None
    cache.remove(key, last_use)
    if not (folder / LOCK).exists():  # not written by this module, so no process is reading it
        shutil.rmtree(folder, ignore_errors=True)
