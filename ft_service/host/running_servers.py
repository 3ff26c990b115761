"""Running servers of a home, which each adds itself to the home's `server.json`, the newest first.

`{"url": …, "pid": …, "process": …, "models": […], "others": [{"url": …, …}]}`: a server removes
itself when it ends; readers skip one that was killed, since its process is not alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ft_service.host.processes import ProcessIdentity, is_alive, of

log = logging.getLogger(__name__)

SERVERS = "server.json"
_MOST = 8
"""Largest number of servers in the file: removed containers cannot be distinguished from running
ones.
"""


class Server(BaseModel):
    """One server. `url`: `http://host:port`, as reached from its host."""

    url: str
    pid: int
    process: ProcessIdentity
    models: list[Path] = []
    """Its model folders."""


def living_servers(home: Path) -> list[Server]:
    """Return the running servers of a home, the newest first; after them those that cannot be seen
    from here (in a container).
    """
    states = [(server, is_alive(server.process)) for server in _written(home / SERVERS)]
    return [server for server, lives in states if lives] + [
        server for server, lives in states if lives is None
    ]


@contextlib.contextmanager
def announced(home: Path, url: str, models: Sequence[Path] = ()) -> Iterator[None]:
    """Announce that this process serves `home` and the bases of some folders at `url`, while the
    block runs.
    """
    process = of(os.getpid())
    with _changing(home):
        _write(
            home,
            [
                Server(url=url, pid=process.pid, process=process, models=list(models)),
                *living_servers(home),
            ],
        )
    try:
        yield
    finally:
        try:
            with _changing(home):
                _write(
                    home, [server for server in living_servers(home) if server.process != process]
                )
        except (
            OSError
        ) as error:  # the disk is read-only, or full; readers skip processes that have ended
            log.warning("%s still names this server: %s", home / SERVERS, error)


def write_private(path: Path, body: str) -> None:
    """Write or replace a file that only its owner may read, atomically."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(body)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def _written(path: Path) -> list[Server]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return [Server.model_validate(entry) for entry in (document, *document.get("others", ()))]
    except (OSError, ValueError, ValidationError, AttributeError, TypeError):
        return []


def _write(home: Path, servers: Sequence[Server]) -> None:
    if not servers:
        (home / SERVERS).unlink(missing_ok=True)
        return
    newest, *others = (server.model_dump(mode="json") for server in servers[:_MOST])
    write_private(home / SERVERS, json.dumps({**newest, "others": others}) + "\n")


@contextlib.contextmanager
def _changing(home: Path) -> Iterator[None]:
    """Lock the home against other servers; without effect on a file system without locks."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
