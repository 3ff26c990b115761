"""Full and read-only disks: their errors, messages for users, and reserved space for writes that
must succeed.

A full disk is a matter for the operator, not a fault of a job: a write without room waits, or is
retried later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

from ft_service.errors import UnavailableError

NO_ROOM = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
"""errno → clause that says it."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""errno of a file system without file locks."""
DISK_FULL = "disk_full"
"""`error.code` of a write that found no room."""
LEAST_BYTES = 1024**2
"""Free bytes below which a disk counts as full: a small write may still succeed where a larger one
does not.
"""
LAST_WORDS_BYTES = 64 * 1024
"""Space for the last records of a process."""
DELETION_BYTES = 4 * 1024**2
"""Space for what a few hundred deletions write."""


def os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused an error, or the error itself if it is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def is_no_room(error: BaseException | None) -> bool:
    """Return whether an error was caused by a full disk."""
    cause = os_error(error)
    return cause is not None and cause.errno in NO_ROOM


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write to a folder, which may not exist yet.

    Raises OSError.
    """
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def no_room(folder: Path, error: OSError | None = None) -> str:
    """Return the message for the user. `error`: the failed write; None: hardly anything is free."""
    what = (
        NO_ROOM[error.errno] if error is not None and error.errno in NO_ROOM else "the disk is full"
    )
    where = folder if error is None or not isinstance(error.filename, str) else Path(error.filename)
    return f"{where}: {what}, and {free_bytes(folder):,} bytes are free there. Free some."


def full(whose: str = "The service's disk") -> UnavailableError:
    """Return the error for a full disk. `whose`: the disk, as the start of a sentence."""
    return UnavailableError(
        f"{whose} is full: nothing can be stored until there is room. Stored data can be read, "
        "and deleted.",
        code=DISK_FULL,
        retry_after=None,
    )


def read_only(whose: str = "The service's disk") -> UnavailableError:
    """Return the error for a read-only disk."""
    return UnavailableError(
        f"{whose} is read-only: nothing can be stored or deleted until it is writable again. "
        "Stored data can be read.",
        code="disk_read_only",
        retry_after=None,
    )


def disk_fault(error: OSError, whose: str = "The service's disk") -> UnavailableError | None:
    """Return what an OSError means for the disk; None: it has another cause."""
    if error.errno in NO_ROOM:
        return full(whose)
    return read_only(whose) if error.errno == errno.EROFS else None


def state_of(folder: Path, whose: str = "The service's disk") -> UnavailableError | None:
    """Return the fault of a folder's file system; None: it has room, and is writable."""
    try:
        stats = os.statvfs(folder)
        # statvfs does not show that the kernel made it read-only after an error.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return disk_fault(error, whose)
    return full(whose) if stats.f_bavail * stats.f_frsize < LEAST_BYTES else None


class FileReserve:
    """File that reserves space on its disk, and is deleted when that space is needed to free
    more.
    """

    def __init__(self, path: Path, size: int = DELETION_BYTES) -> None:
        self.path = path
        self._size = size

    def keep(self) -> bool:
        """Reserve the space, unless it is reserved. False: there is too little."""
        try:
            if self.path.stat().st_size >= self._size:
                return True
        except OSError:
            pass
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size)
            finally:
                os.close(descriptor)
        except OSError:
            self.give_up()
            return False
        return True

    def give_up_if_full(self) -> None:
        """Delete the file if there is little other space on the disk."""
        try:
            stats = os.statvfs(self.path.parent)
        except OSError:
            return
        if stats.f_bavail * stats.f_frsize < self._size:
            self.give_up()

    def give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


class UnnamedReserve:
    """Space on the disk of a folder, reserved for the last records of this process by a file
    without a name, which disappears with the process.
    """

    def __init__(self, folder: Path) -> None:
        """Reserve the space, if possible."""
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._descriptor, 0, LAST_WORDS_BYTES)
        except OSError:  # such as on NFS
            self.free()

    def free(self) -> None:
        """Release the space."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
