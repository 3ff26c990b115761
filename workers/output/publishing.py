"""Publishing the outcome under its final names, so that of two attempts that publish at once the
later one's stays, whole.

It is made under a name of the attempt's own. A final name that is free is taken by an operation
that fails if another attempt was first. One that is taken is replaced only after another look at
the fence: it is either an earlier attempt's, which ended between its adapter and its result, or a
later one's, and then this attempt is over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from ft_service.host.disk import NO_ROOM, free_bytes
from ft_service.rundir.attempt_seal import Fence, SealedError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import MANIFEST

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


@contextmanager
def adapter_folder(target: Path, fence: Fence) -> Iterator[Path]:
    """A temporary folder next to `target`, which it becomes at the end.

    Raises SealedError if the attempt is over by then.
    """
    temporary = target.with_name(f"{target.name}.tmp-a{fence.attempt}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _put_folder(temporary, target, fence)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    remove_left_folders(target, fence)


def remove_left_folders(target: Path, fence: Fence) -> None:
    """Remove the temporary folders of earlier attempts that were killed while they wrote
    `target`.
    """
    for left in target.parent.glob(f"{target.name}.tmp*"):
        if _attempt_in_name(left) < fence.attempt:
            shutil.rmtree(left, ignore_errors=True)


def put_document(run: RunDir, key: str, body: bytes, fence: Fence) -> None:
    """Write one document of the outcome. Raises SealedError."""
    fence.check()
    if not run.put_if_absent(key, body):
        fence.check()
        run.put(key, body)


def write_document(run: RunDir, key: str, document: BaseModel, fence: Fence) -> None:
    put_document(run, key, document.model_dump_json(indent=2).encode() + b"\n", fence)


def _put_folder(made: Path, target: Path, fence: Fence) -> None:
    while True:
        fence.check()
        try:
            made.rename(target)  # which refuses where a folder with something in it is
            return
        except OSError as error:
            fence.check()
            if error.errno not in _TAKEN:
                raise
        _retire(target, fence)


def _retire(target: Path, fence: Fence) -> None:
    """Move an earlier attempt's folder away; put it back if it turns out to be a later one's."""
    away = target.with_name(f"{target.name}.tmp-before-a{fence.attempt}")
    shutil.rmtree(away, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(away)
    if _attempt_of(away) > fence.attempt:
        away.rename(target)
        raise SealedError(f"Attempt {fence.attempt} is over: a later one has published.")
    shutil.rmtree(away, ignore_errors=True)


def _attempt_of(folder: Path) -> int:
    """The attempt that wrote an adapter, by its manifest; 0: none."""
    try:
        return int(json.loads((folder / MANIFEST).read_bytes())["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _attempt_in_name(path: Path) -> int:
    number = path.name.rpartition("-a")[2]
    return int(number) if number.isdecimal() else 0


FULL = {**NO_ROOM, errno.EFBIG: "the file would exceed the limit of file sizes"}
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def explained(error: OSError, folder: Path, needed: int) -> str:
    """A disk's error as a sentence: path, cause, bytes needed and free, and what to do.

    `folder`: where `needed` bytes should go.
    """
    where = error.filename or folder
    if error.errno in FULL:
        return (
            f"{where}: {FULL[error.errno]}. More than {needed:,} bytes are needed, and "
            f"{free_bytes(folder):,} are free there. "
            "Free some, or keep fewer checkpoints (checkpoint.save_total_limit)."
        )
    if error.errno in FORBIDDEN:
        return f"{where}: {error.strerror}. Let user {os.geteuid()} write there."
    return f"{where}: {error.strerror or error}."


def sync(folder: Path) -> None:
    """Make the files of a folder, and their names, survive a loss of power."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
