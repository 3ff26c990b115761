"""A cache of folders on this host, such as quantised bases: found by key, published as a whole,
evicted by last use.

    FT_CACHE          the folder; unset: FT_HOME/cache, which supervisors pass to their workers;
    empty: no cache FT_CACHE_BYTES    its limit; unset: half of the sum of its bytes and its disk's
    free bytes; 0: no cache

    <key>/index.json      contents of the entry; its modification time is the last use of the entry
    <key>/lock            locked (shared) by every process that reads or writes the entry,
    exclusively to remove it .new-*/  .old-*/      entries that are being written or removed

An entry appears by the rename of a finished folder, and the first of several writers wins, so that
any number of processes may find, write and remove entries at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_service.errors import FtError

FOLDER = "FT_CACHE"
LIMIT = "FT_CACHE_BYTES"
INDEX = "index.json"
LOCK = "lock"


def folder_of(environment: Mapping[str, str], home: Path) -> Path | None:
    """The folder of this host's cache; None: no cache. `home`: FT_HOME."""
    given = environment.get(FOLDER)
    if given is None:
        return home / "cache"
    return Path(given).expanduser().absolute() if given else None


@dataclass
class CacheEntry:
    """An open entry, whose folder is not removed until it is closed."""

    folder: Path
    _lock: int

    def close(self) -> None:
        os.close(self._lock)


@dataclass(frozen=True)
class Cache:
    """A cache folder with its limit."""

    folder: Path
    limit: int | None = None
    """Bytes; None: half of the sum of its bytes and its disk's free bytes."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Cache | None:
        """The cache of a worker, which has no FT_HOME.

        Raises FtError if FT_CACHE_BYTES is not a number of bytes.
        """
        folder = environment.get(FOLDER, "")
        limit = environment.get(LIMIT, "")
        if limit and not limit.isdecimal():
            message = f"{LIMIT} = {limit!r}: a number of bytes is needed; 0 turns the cache off."
            raise FtError(message, param=LIMIT, code="invalid_setting")
        if not folder or limit == "0":
            return None
        return cls(Path(folder).expanduser().absolute(), int(limit) if limit else None)

    def find(self, key: str) -> CacheEntry | None:
        """Open the entry of a key, and mark it as used. Close it after reading."""
        entry = _locked(self.folder / key)
        if entry is not None:
            with contextlib.suppress(
                OSError
            ):  # it belongs to another user or is read-only, but can be read
                os.utime(entry.folder / INDEX)
        return entry

    def stage(self, size: int) -> CacheEntry | None:
        """Create a folder for an entry of about `size` bytes; older entries are removed to make
        room. None: there is no room.

        Raises OSError if the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._make_room(size):
            return None
        staged = self.folder / f".new-{uuid.uuid4().hex}"
        staged.mkdir()
        lock = None
        try:
            lock = os.open(staged / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError:  # such as in a file system without locks
            if lock is not None:
                os.close(lock)
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return CacheEntry(staged, lock)

    def publish(self, staged: CacheEntry, key: str) -> bool:
        """Make a staged folder, with its index, the entry of a key, and close it.

        False: another writer was first.
        """
        try:
            staged.folder.rename(self.folder / key)
        except OSError:
            self.discard(staged)
            return False
        staged.close()
        return True

    def discard(self, staged: CacheEntry) -> None:
        """Remove a staged folder and close it."""
        staged.close()
        shutil.rmtree(staged.folder, ignore_errors=True)

    def remove(self, key: str, last_use: int | None = None) -> bool:
        """Remove an entry unless it is in use, or was used after `last_use` (ns); True if it was
        removed.
        """
        return _remove(self.folder / key, last_use)

    def entries(self) -> dict[Path, int]:
        """Folder → last use (ns since the epoch) of complete entries, the least recently used
        first.
        """
        used_at: list[tuple[int, Path]] = []
        for path in self.folder.glob(f"[!.]*/{INDEX}"):
            with contextlib.suppress(FileNotFoundError):  # it was removed
                used_at.append((path.stat().st_mtime_ns, path.parent))
        return {folder: used for used, folder in sorted(used_at)}

    def _make_room(self, size: int) -> bool:
        for leftover in self.folder.glob(".old-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.folder.glob(".new-*"):
            _remove(leftover)  # from writers that were killed: a running one holds its lock
        held = {folder: _bytes_in(folder) for folder in self.entries()}
        limit = self._limit(sum(held.values()))
        if size > limit:
            return False
        for folder in list(held):
            if sum(held.values()) + size <= limit:
                break
            if _remove(folder):
                del held[folder]
        return sum(held.values()) + size <= limit

    def _limit(self, held: int) -> int:
        return (
            self.limit
            if self.limit is not None
            else (shutil.disk_usage(self.folder).free + held) // 2
        )


def _locked(folder: Path, how: int = fcntl.LOCK_SH) -> CacheEntry | None:
    """Lock a folder without waiting; None: it does not exist, or is locked otherwise."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        if (folder / LOCK).stat().st_ino == os.fstat(lock).st_ino:  # it may have been replaced
            return CacheEntry(folder, lock)
    except OSError:
        pass
    os.close(lock)
    return None


def _remove(folder: Path, last_use: int | None = None) -> bool:
    entry = _locked(folder, fcntl.LOCK_EX)
    if entry is None:
        return False
    away = folder.with_name(f".old-{uuid.uuid4().hex}")
    try:
        if last_use is not None and (folder / INDEX).stat().st_mtime_ns != last_use:
            return False
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)
    except OSError:
        return False
    finally:
        entry.close()
    return True


def _bytes_in(folder: Path) -> int:
    total = 0
    with contextlib.suppress(
        FileNotFoundError
    ):  # another process has just removed it, or parts of it
        for path in folder.iterdir():
            total += path.stat().st_size
    return total
