"""Files compared with their digests before they are given away, once for each state that they are in.

A file that is read for somebody else, an adapter above all, may have lost a bit, or have been changed by hand. Reading all of
it at each request would cost too much: what was compared is remembered by device, inode, size and times, in this process.
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
"""Files whose digests are remembered; the ones used longest ago are forgotten first."""

_State = tuple[int, int, int, int, int]
_guard = threading.Lock()
_digests: OrderedDict[Path, tuple[_State, str]] = OrderedDict()


def fault(path: Path, expected: FileDigest) -> str | None:
    """What is wrong with a file, in words that follow its name; None: nothing. Reads it if it is in a state that was not read
    before."""
    size = path.stat().st_size if path.is_file() else None
    return expected.fault(size, partial(_digest, path))


def adapter_faults(folder: Path) -> list[str]:
    """What is wrong with an adapter by its own manifest; empty: nothing, or it has none that could tell."""
    if not (folder / MANIFEST).exists():
        return []
    manifest, faults = read_manifest(folder / MANIFEST)
    files = manifest.files.items() if manifest is not None else ()
    return faults + [f"{name} {wrong}" for name, expected in files if (wrong := fault(folder / name, expected))]


def refuse_damaged(folder: Path, name: str) -> None:
    """Raises NotFoundError for an adapter that is not what was written. `name`: the model's, for the user."""
    faults = adapter_faults(folder)
    if faults:
        raise NotFoundError(
            f"The adapter of {name} is damaged on the service's disk and is not given away: {'; '.join(faults[:3])}. Use a "
            "checkpoint of its job, or train it again.",
            param="model",
            code="adapter_damaged",
        )


def _digest(path: Path) -> str:
    before = _state(path)
    with _guard:
        known = _digests.get(path)
        if known is not None and known[0] == before:
            _digests.move_to_end(path)
            return known[1]
    found = sha256_of(path)
    with _guard:
        _digests[path] = (before, found)  # a change meanwhile has another state
        while len(_digests) > MOST_REMEMBERED:
            _digests.popitem(last=False)
    return found


def _state(path: Path) -> _State:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
