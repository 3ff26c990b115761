"""FT_HOME: a folder that only its owner can read, whichever process creates it."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from ft_service.errors import SpecError

PRIVATE = 0o700


def create_home(home: Path) -> None:
    """Create FT_HOME for its owner only, unless it exists.

    Raises SpecError where no folder can be, and OSError.
    """
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(mode=PRIVATE, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise SpecError(
            f"The folder {home} cannot be made: there is a file on its path. Name another "
            "(FT_HOME)."
        ) from None
    except (FileNotFoundError, PermissionError) as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(
            f"The folder {home} cannot be made: {reason}. Name another (FT_HOME)."
        ) from None


def require_writable(home: Path) -> None:
    """Raise SpecError if this user may not write in FT_HOME, with whose it is.

    A full or read-only disk is told where something is written. Raises OSError if there is no such
    folder.
    """
    is_writable = os.access(home, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
    if not is_writable and not os.statvfs(home).f_flag & os.ST_RDONLY:
        found = home.stat()
        owner = name_of(found.st_uid)
        mode = stat.S_IMODE(found.st_mode)
        raise SpecError(
            f"FT_HOME = {home} is not for {name_of(os.geteuid())}: it belongs to {owner} and has "
            f"mode {mode:04o}. Run this as "
            f"{owner}, or name another folder.",
            param="FT_HOME",
        )


def name_of(user: int) -> str:
    """Return the name of a user for a message: a container's may have none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read, unless it exists. Raises OSError."""
    os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))


def openness(home: Path) -> str | None:
    """Return a warning if other users of this host can read FT_HOME; None: they cannot."""
    mode = stat.S_IMODE(home.stat().st_mode)
    if not mode & 0o077:
        return None
    warning = (
        f"{home} has mode {mode:04o}: other users of this host may read data files, "
        "adapters and secrets in it."
    )
    return f"{warning} Close it: chmod 700 {home}"
