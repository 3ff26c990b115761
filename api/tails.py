"""The end of a log file."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_BYTES = 1024**2


def tail(path: Path, lines: int) -> str:
    """The last `lines` lines of a file, at most 1 MiB of it; bytes that are not UTF-8 are replaced."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_BYTES))
        body = file.read(_MAX_BYTES)
    kept = body.decode(errors="replace").splitlines(keepends=True)[-lines:]
    return "".join(kept)
