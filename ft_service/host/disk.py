"""Disks that take no more writes: which errors say so, how users are told, and room kept for what must still be written.

A full disk is the operator's matter and not the fault of a job: what finds no room waits for some, or is tried again later.
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
"""errno → what it says."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""errno of a file system on which files cannot be locked."""
DISK_FULL = "disk_full"
"""`error.code` of what found no room."""
LEAST_BYTES = 1024**2
"""Bytes free, below which a disk counts as full: a small write may still find room, and the next larger one does not."""
LAST_WORDS_BYTES = 64 * 1024
"""Room for the last words of a process."""
DELETION_BYTES = 4 * 1024**2
"""Room for what some hundred deletions write."""


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


def full(whose: str = "The service's disk") -> UnavailableError:
    """The error where there is no room. `whose`: the disk, as a sentence begins with it."""
    return UnavailableError(
        f"{whose} is full: nothing can be stored until there is room. What is stored can be read, and deleted.",
        code=DISK_FULL,
        retry_after=None,
    )


def read_only(whose: str = "The service's disk") -> UnavailableError:
    """The error where nothing may be written."""
    return UnavailableError(
        f"{whose} is read-only: nothing can be stored or deleted until it is writable again. What is stored can be read.",
        code="disk_read_only",
        retry_after=None,
    )


def disk_fault(error: OSError, whose: str = "The service's disk") -> UnavailableError | None:
    """What an error of the file system says of its disk; None: nothing, it is another fault."""
    if error.errno in NO_ROOM:
        return full(whose)
    return read_only(whose) if error.errno == errno.EROFS else None


def state_of(folder: Path, whose: str = "The service's disk") -> UnavailableError | None:
    """The fault that a folder's file system shows; None: there is room on it, and it may be written."""
    try:
        found = os.statvfs(folder)
        # One that its kernel has made read-only after an error does not say so.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return disk_fault(error, whose)
    return full(whose) if found.f_bavail * found.f_frsize < LEAST_BYTES else None


class FileReserve:
    """A file that keeps room on its disk, and is given up when somebody needs that to make more room."""

    def __init__(self, path: Path, size: int = DELETION_BYTES) -> None:
        self.path = path
        self._size = size

    def keep(self) -> bool:
        """Take the room, unless it is taken already. False: there is none to take."""
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
        """Give the room up if there is little else on the disk."""
        try:
            found = os.statvfs(self.path.parent)
        except OSError:
            return
        if found.f_bavail * found.f_frsize < self._size:
            self.give_up()

    def give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


class UnnamedReserve:
    """Some room on the disk of a folder, kept for the last words of this process. It has no name, and goes with
    the process."""

    def __init__(self, folder: Path) -> None:
        """Where none can be had, none is kept."""
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._descriptor, 0, LAST_WORDS_BYTES)
        except OSError:  # such as on NFS
            self.free()

    def free(self) -> None:
        """Give the room back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
