"""Room on disks: which errors say that there is none, and how a user is told.

Whoever finds no room waits for some, or lets somebody try again later: the disk is the operator's matter, no fault of a job's.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

NO_ROOM = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
"""errno → what it says."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""errno of a file system on which files cannot be locked."""
DISK_FULL = "disk_full"
"""`error.code` of what found no room."""
NEARLY_NOTHING = 1024**2
"""Bytes free, below which whatever failed has failed for want of room."""
RESERVE_BYTES = 64 * 1024


def os_error(error: BaseException | None) -> OSError | None:
    """The OSError that caused an error, or that it is."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def is_no_room(error: BaseException | None) -> bool:
    """Whether an error is for want of room on a disk."""
    cause = os_error(error)
    return cause is not None and cause.errno in NO_ROOM


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write there, or where the folder would be. Raises OSError."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def no_room(folder: Path, error: OSError | None = None) -> str:
    """The sentence for the user. `error`: that said so; None: hardly anything is free."""
    what = NO_ROOM[error.errno] if error is not None and error.errno in NO_ROOM else "the disk is full"
    where = folder if error is None or not isinstance(error.filename, str) else Path(error.filename)
    return f"{where}: {what}, and {free_bytes(folder):,} bytes are free there. Free some."


class Reserve:
    """Some room on the disk of a folder, kept for the last words of this process. It has no name, and goes with the process."""

    def __init__(self, folder: Path) -> None:
        """Where none can be had, none is kept."""
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._descriptor, 0, RESERVE_BYTES)
        except OSError:  # such as on NFS
            self.free()

    def free(self) -> None:
        """Give the room back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
