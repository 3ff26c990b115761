"""Errors of a disk, in words that help."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ft_service.host.disk import NO_ROOM, free_bytes

FULL = {**NO_ROOM, errno.EFBIG: "the file would exceed the limit of file sizes"}
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def explained(error: OSError, folder: Path, needed: int) -> str:
    """A disk's error as a sentence: path, cause, bytes needed and free, and what to do. `folder`: where `needed` bytes should
    go.
    """
    where = error.filename or folder
    if error.errno in FULL:
        return (
            f"{where}: {FULL[error.errno]}. More than {needed:,} bytes are needed, and {free_bytes(folder):,} are free there. "
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
