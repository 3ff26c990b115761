"""Comparison of files with their digests before they are served, once for each state of a file.

A file to be served, such as an adapter, may be corrupted or edited. Reading it at each request
would cost too much, so results are cached in this process by device, inode, size and times.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from pathlib import Path

from ft_service.errors import NotFoundError
from ft_service.rundir.directory import sha256_of
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.manifest import MANIFEST
from ft_service.rundir.verify import read_manifest

MOST_REMEMBERED = 10_000
"""Number of cached digests; the least recently used are dropped first."""

_State = tuple[int, int, int, int, int]
_guard = threading.Lock()
_digests: OrderedDict[Path, tuple[_State, str]] = OrderedDict()


def fault(path: Path, expected: FileDigest) -> str | None:
    """Return the fault of a file as a clause that follows its name; None: none.

    Reads the file unless its state is cached.
    """
    size = path.stat().st_size if path.is_file() else None
    return expected.fault(size, partial(_digest, path))


def adapter_faults(folder: Path) -> list[str]:
    """Return the faults of an adapter by its own manifest; empty: none, or it has no manifest."""
    if not (folder / MANIFEST).exists():
        return []
    manifest, faults = read_manifest(folder / MANIFEST)
    files = manifest.files.items() if manifest is not None else ()
    return faults + [
        f"{name} {wrong}" for name, expected in files if (wrong := fault(folder / name, expected))
    ]


def refuse_damaged(folder: Path, name: str) -> None:
    """Raise NotFoundError for an adapter whose files differ from its manifest.

    `name`: the model's, for the user.
    """
    faults = adapter_faults(folder)
    if faults:
        raise NotFoundError(
            f"The adapter of {name} is damaged on the service's disk and is not served: "
            f"{'; '.join(faults[:3])}. Use a "
            "checkpoint of its job, or train it again.",
            param="model",
            code="adapter_damaged",
        )


def _digest(path: Path) -> str:
    before = _state(path)
    with _guard:
        cached = _digests.get(path)
        if cached is not None and cached[0] == before:
            _digests.move_to_end(path)
            return cached[1]
    digest = sha256_of(path)
    with _guard:
        _digests[path] = (before, digest)  # a file changed meanwhile has another state
        while len(_digests) > MOST_REMEMBERED:
            _digests.popitem(last=False)
    return digest


def _state(path: Path) -> _State:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
