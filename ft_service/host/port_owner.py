"""Process that listens on a port of this host, as far as this process may see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"
_WORDS = 60
"""Longest part of a command that is shown, in characters."""


def holder(port: int) -> str:
    """Return a description of the process that listens on a TCP port: a server of this service with
    its home, or the process and its command, or `another program`, which runs in a container or as
    another user.
    """
    wanted = set(_sockets(port))
    for process in Path("/proc").iterdir() if wanted else ():
        if process.name.isdigit() and _holds(process, wanted):
            return _described(process)
    return "another program"


def _sockets(port: int) -> Iterator[str]:
    """Yield the names in `/proc/PID/fd` of sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(str(file.readlink()) in sockets for file in (process / "fd").iterdir())
    except OSError:  # another user's process, or it has ended
        return False


def _described(process: Path) -> str:
    try:
        words = [
            word
            for word in (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if word
        ]
        if "serve" in words and any(Path(word).name in ("ft", "ft_service.cli") for word in words):
            return f"the server of {_home(process)} (process {process.name})"
    except OSError:
        words = []
    command = " ".join(words)
    shown = f": {command[:_WORDS]}{'…' if len(command) > _WORDS else ''}" if command else ""
    return f"process {process.name}{shown}"


def _home(process: Path) -> Path:
    """Return FT_HOME of a server of this service, from its environment."""
    given = dict(
        pair.split("=", 1)
        for pair in (process / "environ").read_text(errors="replace", encoding="utf-8").split("\0")
        if "=" in pair
    )
    home = Path(given.get("FT_HOME") or Path(given.get("HOME", "/"), ".ft"))
    return home if home.is_absolute() else (process / "cwd").readlink() / home
