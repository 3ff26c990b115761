"""All ranks together load a base from the cache, or leave there what they quantised.

Every step that only some ranks can judge ends in an agreement: either all use an entry, or none
does. Faults of the cache are never the job's: they become notes, and the base is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ft_service.bases.cache_folder import INDEX, LIMIT, Cache, CacheEntry
from workers.base.frozen_weights import FrozenWeight, Level, Loaded
from workers.base.quantized_base import (
    OF_WEIGHTS,
    CacheFile,
    QuantizedIndex,
    base_digest,
    entry_key,
    faults,
    parts_of,
    read_entry_index,
    read_rows,
    storage_key,
    write_entry_index,
    write_rows,
)
from workers.base.rank_objects import from_all, from_first


class BaseCache:
    """The entry of one base in one storage. Every method is called by all ranks together."""

    def __init__(self, cache: Cache, folder: Path, weights: Mapping[str, FrozenWeight]) -> None:
        """`weights`: their storage is allocated."""
        self._cache = cache
        self._weights = weights
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self.notes: list[tuple[Level, str]] = []
        """(level, text)."""
        self._key = from_first(self._find_key(folder) if self._rank == 0 else "")

    def load(self, tell: Callable[[], None]) -> Loaded | None:
        """Fill the weights from the cache.  None: the cache does not hold them, and nothing is
        filled. `tell` is called between weights.
        """
        entry = self._cache.find(self._key) if self._rank == 0 else None
        folder = from_first(entry.folder if entry else None)
        if folder is None:
            return None
        loaded = None
        index = self._checked_index(folder)
        if index is not None:
            targets = {
                name: (weight.storage, weight.rows) for name, weight in self._weights.items()
            }
            read = read_rows(folder, index.files, targets, tell)
            self.notes.append(
                (
                    "info",
                    "The quantised base was read from the cache; the base's own weights were not "
                    "opened.",
                )
            )
            weights = {name: getattr(index, name) for name in OF_WEIGHTS}
            loaded = Loaded(**weights, cached=True, bytes_read=read, notes=self.notes)
        from_all(None)  # the entry must not go before the slowest rank has read it
        if entry is not None:
            entry.close()
        if entry is not None and index is None:
            self._cache.remove(self._key)
        return loaded

    def save(self, loaded: Loaded) -> None:
        """Leave the filled weights in the cache if that can be done."""
        mine = self._to_write()
        sizes = from_all(
            sum(
                part.nbytes
                for w in mine.values()
                for part in parts_of(w.storage, w.face.dtype).values()
            )
        )
        staged, why = self._stage(sum(sizes)) if self._rank == 0 else (None, "")
        folder, why = from_first((staged.folder if staged else None, why))
        if folder is None:
            self.notes.append(("warn", f"The quantised base is not kept for other jobs: {why}."))
            return
        written = from_all(self._write(folder, mine))
        failed = [outcome for outcome in written if isinstance(outcome, str)]
        files = [outcome for outcome in written if isinstance(outcome, CacheFile)]
        if staged is not None:
            why = self._publish(staged, files, loaded, failed)
        why = from_first(why)
        if why:
            self.notes.append(("warn", f"The quantised base is not kept for other jobs: {why}."))
        else:
            self.notes.append(
                (
                    "info",
                    f"The quantised base is kept for other jobs ({sum(sizes) / 1e6:,.0f} MB in "
                    "the cache).",
                )
            )

    def _find_key(self, folder: Path) -> str:
        storage = {
            name: storage_key(w.face, w.parameter.shape, tied=len(w.places) > 1)
            for name, w in self._weights.items()
        }
        device = next(iter(self._weights.values())).storage.device
        return entry_key(base_digest(folder), storage, device)

    def _checked_index(self, folder: Path) -> QuantizedIndex | None:
        """The index of an entry whose files are as they were written; every rank looks at its share
        of them.
        """
        if not all(from_all((folder / INDEX).is_file())):
            self.notes.append(
                (
                    "warn",
                    f"The cache is not used: {folder.parent} is not the same folder on all hosts.",
                )
            )
            return None
        problems: list[str] = []
        index = None
        try:
            index = read_entry_index(folder)
            problems += faults(folder, index.files[self._rank :: self._world])
            absent = index.missing({name: weight.rows for name, weight in self._weights.items()})
            problems += [f"no file holds all rows of {name}" for name in absent]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{INDEX} cannot be read ({type(error).__name__}: {error})")
        problems = [problem for of_rank in from_all(problems) for problem in of_rank]
        if problems:
            self.notes.append(
                (
                    "warn",
                    "The cache's copy of the quantised base is damaged and is made again: "
                    f"{problems[0]}.",
                )
            )
            return None
        return index

    def _to_write(self) -> dict[str, FrozenWeight]:
        """The weights of which this rank writes some rows: each row is written by one rank."""
        shard, _, first_replica = self._position()
        return {
            name: weight
            for name, weight in self._weights.items()
            if weight.rows[0] < weight.rows[1]
            and first_replica
            and (isinstance(weight.parameter, DTensor) or shard == 0)
        }

    def _position(self) -> tuple[int, int, bool]:
        """This rank's shard, the number of shards, and whether it is the first of those that hold
        the same rows.
        """
        for weight in self._weights.values():
            if isinstance(weight.parameter, DTensor):
                mesh = weight.parameter.device_mesh
                *replica, shard = mesh.get_coordinate() or [0]
                return shard, mesh.size(mesh.ndim - 1), not any(replica)
        return 0, 1, self._rank == 0

    def _stage(self, size: int) -> tuple[CacheEntry | None, str]:
        try:
            staged = self._cache.stage(size)
        except OSError as error:
            return None, f"{self._cache.folder} cannot be written ({error.strerror})"
        return (
            staged,
            f"its {size / 1e6:,.0f} MB do not fit into the cache ({LIMIT} decides how much does)",
        )

    def _write(self, folder: Path, weights: Mapping[str, FrozenWeight]) -> CacheFile | str | None:
        """What this rank wrote, or why it could not. None: it had nothing to write."""
        if not folder.is_dir():
            return f"{folder.parent} is not the same folder on all hosts"
        if not weights:
            return None
        shard, count, _ = self._position()
        tensors = {name: (weight.storage, weight.face.dtype) for name, weight in weights.items()}
        rows = {name: weight.rows for name, weight in weights.items()}
        try:
            return write_rows(folder, f"rows-{shard:05d}-of-{count:05d}.safetensors", tensors, rows)
        except OSError as error:
            return str(error)

    def _publish(
        self, staged: CacheEntry, files: list[CacheFile], loaded: Loaded, failed: list[str]
    ) -> str:
        """Make the entry visible. Returns why that failed; empty: it is there."""
        try:
            if not failed:
                weights = {name: dict(getattr(loaded, name)) for name in OF_WEIGHTS}
                write_entry_index(staged.folder, QuantizedIndex(files, **weights))
                self._cache.publish(staged, self._key)
                return ""
        except OSError as error:
            failed = [str(error)]
        self._cache.discard(staged)
        return failed[0]
