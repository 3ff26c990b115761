"""Disks that take no more writes: how that is said, in one place, and room that is kept for what makes room again."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from ft_service.errors import UnavailableError

LEAST_BYTES = 1024**2
"""A disk with less room is full: what is stored now and then may still find some, and the next that is larger does not."""
RESERVE_BYTES = 4 * 1024**2
"""Room that a reserve keeps: what some hundred deletions write."""


def full(whose: str = "The service's disk") -> UnavailableError:
    """The error where there is no room. `whose`: the disk, as a sentence begins with it."""
    return UnavailableError(
        f"{whose} is full: nothing can be stored until there is room. What is stored can be read, and deleted.",
        code="disk_full",
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
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
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


class Reserve:
    """A file that keeps room on its disk, and is given up when somebody needs that to make more room."""

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
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
