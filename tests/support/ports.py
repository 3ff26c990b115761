"""Ports, as `/proc` tells of them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANDOM = random.SystemRandom()  # test processes side by side must not draw the same
_LOWEST = 10_000
_OF_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that was free a moment ago; if there are such, one that the kernel gives to nobody who
    does not name it.

    Those that it gives away may be taken before they are used, and between a server's end and its
    next start.
    """
    below = int(_OF_KERNEL.read_text().split()[0])
    while True:
        with socket.socket() as listening:
            try:
                listening.bind(
                    ("127.0.0.1", _RANDOM.randrange(_LOWEST, below) if below > _LOWEST else 0)
                )
            except OSError:  # taken
                continue
            return listening.getsockname()[1]


def listening_sockets(pid: int) -> dict[str, int]:
    """Sockets of a process that wait for connections from the network: inode → port."""
    tables = [
        Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")
    ]
    rows = [line.split() for lines in tables for line in lines]
    listening = {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return {inode: port for inode, port in listening.items() if inode in _sockets_of(pid)}


def _sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile, such as the one that lists the folder
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").rstrip("]"))
    return inodes
