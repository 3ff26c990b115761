"""What is stored below FT_HOME, as pruning sees it: names, sizes, ages and removal. It is on the
disk, or with FT_STORAGE on object storage, under keys that are the paths below FT_HOME.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ft_service.errors import FtError
from ft_service.rundir.checkpoints import MARKER, remove_marker
from ft_service.rundir.project_runs import PROJECT_RUNS, RUNS, run_root
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore, StoredObject
from ft_service.store.records import File

log = logging.getLogger(__name__)


class StoredTree:
    """Folders and files on the disk. All paths are below FT_HOME."""

    def __init__(self, settings: Settings, places: Places) -> None:
        self._settings = settings
        self._places = places

    @staticmethod
    def of(settings: Settings) -> StoredTree:
        """Return the tree of the settings. Raises SpecError if FT_STORAGE is not a usable URL."""
        places = Places.of(settings)
        if places.objects is not None:
            return ObjectTree(settings, places, places.objects)
        return StoredTree(settings, places)

    def names(self, folder: Path) -> Iterator[str]:
        """Names directly in a folder, which may not exist."""
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            yield from (entry.name for entry in entries)

    def folders(self, folder: Path) -> list[Path]:
        """Folders directly in a folder, which may not exist."""
        return [path for path in folder.glob("*") if path.is_dir()]

    def size(self, path: Path) -> int:
        """Bytes of the files at or below a path; files that vanish meanwhile are not counted."""
        return size_of(path)

    def changed_at(self, path: Path) -> float:
        """Time of the newest change at or below a path, in seconds since the epoch."""
        return max(
            (entry.stat().st_mtime for entry in _everything(path) if not entry.is_symlink()),
            default=0.0,
        )

    def root(self, path: Path) -> Path | None:
        """The run directory that a link in `runs` leads to, so that it is measured and removed
        itself; None: it was replaced by a link, which is not followed. Another path is returned
        unchanged.
        """
        if not path.is_relative_to(self._settings.runs_dir):
            return path
        job_id, *below = path.relative_to(self._settings.runs_dir).parts
        try:
            return run_root(self._settings.home, job_id).joinpath(*below)
        except FtError as error:
            log.warning("%s", error.message)
            return None

    def exists(self, path: Path) -> bool:
        return path.exists()

    def remove(self, path: Path) -> None:
        """Remove a path and all below it, of a checkpoint its marker first. Raises OSError."""
        if path.is_dir() and not path.is_symlink():
            remove_marker(path)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if path.parents[1] == self._settings.home / PROJECT_RUNS:
            (self._settings.runs_dir / path.name).unlink(missing_ok=True)

    def remove_file(self, file: File) -> None:
        """Remove the bytes and the tokens of a deleted file. Raises OSError."""
        self._places.remove(file.id)
        self._places.remove_tokens(file.sha256)


class ObjectTree(StoredTree):
    """Objects, and the copies of them on this host, which go with them."""

    def __init__(self, settings: Settings, places: Places, objects: ObjectStore) -> None:
        super().__init__(settings, places)
        self._objects = objects
        self._listed: tuple[str, dict[str, StoredObject]] = ("", {})
        """The newest listing: one request answers all questions about a run directory."""

    def names(self, folder: Path) -> Iterator[str]:
        yield from self._objects.names(self._key(folder))

    def folders(self, folder: Path) -> list[Path]:
        key = self._key(folder)
        below = (name.removeprefix(f"{key}/") for name in self._below(folder))
        return [folder / name for name in sorted({x.split("/")[0] for x in below if "/" in x})]

    def size(self, path: Path) -> int:
        return sum(found.bytes for found in self._below(path).values())

    def changed_at(self, path: Path) -> float:
        """As the storage tells it; an object without a time counts as new."""
        times = [found.changed_at for found in self._below(path).values()]
        return max((time.time() if at is None else at for at in times), default=0.0)

    def root(self, path: Path) -> Path | None:
        return path

    def exists(self, path: Path) -> bool:
        return bool(self._below(path))

    def remove(self, path: Path) -> None:
        """As on the disk. Raises UnavailableError."""
        found = self._below(path)
        self._listed = ("", {})
        marker = f"{self._key(path)}/{MARKER}"
        for name in sorted(found, key=lambda name: (name != marker, name)):
            self._objects.remove(name)
        super().remove(path)

    def _below(self, path: Path) -> dict[str, StoredObject]:
        """The objects at or below a path, by key."""
        key = self._key(path)
        parts = key.split("/")
        top = "/".join(parts[:2]) if parts[0] == RUNS and len(parts) > 1 else key
        if self._listed[0] != top:
            found = self._objects.entries(top)
            if not found and (single := self._objects.entry(top)) is not None:
                found = {top: single}
            self._listed = (top, found)
        return {
            name: found
            for name, found in self._listed[1].items()
            if name == key or name.startswith(f"{key}/")
        }

    def _key(self, path: Path) -> str:
        return path.relative_to(self._settings.home).as_posix()


def size_of(path: Path) -> int:
    """Bytes of the files at or below a path of the disk."""
    total = 0
    for entry in _everything(path):
        with contextlib.suppress(OSError):
            total += entry.lstat().st_size if not entry.is_dir() else 0
    return total


def _everything(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")
