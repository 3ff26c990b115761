"""FT_HOME: a folder that only its owner can read, whichever process creates it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE = 0o700


def create_home(home: Path) -> None:
    """Create FT_HOME for its owner only, unless it exists. Raises OSError."""
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=PRIVATE, exist_ok=True)


def create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read, unless it exists. Raises OSError."""
    os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))


def openness(home: Path) -> str | None:
    """Return a warning if other users of this host can read FT_HOME; None: they cannot."""
    mode = stat.S_IMODE(home.stat().st_mode)
    if not mode & 0o077:
        return None
    warning = f"{home} has mode {mode:04o}: other users of this host may read data files, adapters and secrets in it."
    return f"{warning} Close it: chmod 700 {home}"
