"""Where the servers of a home are: each living one says so in the home's `server.json`, the newest first.

`{"url": …, "pid": …, "process": …, "models": […], "others": [{"url": …, …}]}`: a server that ends takes itself out; one that
was killed is passed over by whoever reads, since its process lives no more.
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
"""Servers that the file names: those in containers that are gone look as those that are there."""


class Server(BaseModel):
    """One server. `url`: `http://host:port`, as it is reached from its host."""

    url: str
    pid: int
    process: ProcessIdentity | None = None
    """None: written by a version that did not say."""
    models: list[Path] = []
    """Its model folders."""


def living_servers(home: Path) -> list[Server]:
    """The servers of a home that live, the newest first; after them those that cannot be seen from here (in a container)."""
    states = [(server, _lives(server)) for server in _written(home / SERVERS)]
    return [server for server, lives in states if lives] + [server for server, lives in states if lives is None]


@contextlib.contextmanager
def announced(home: Path, url: str, models: Sequence[Path] = ()) -> Iterator[None]:
    """Say that this process serves `home` and the bases of some folders at `url`, while the block runs."""
    process = of(os.getpid())
    with _changing(home):
        _write(home, [Server(url=url, pid=process.pid, process=process, models=list(models)), *living_servers(home)])
    try:
        yield
    finally:
        try:
            with _changing(home):
                _write(home, [server for server in living_servers(home) if server.process != process])
        except OSError as error:  # the disk is read-only, or full: who reads the file passes over processes that are gone
            log.warning("%s still names this server: %s", home / SERVERS, error)


def write_private(path: Path, body: str) -> None:
    """Write or replace a file that only its owner may read, whole or not at all."""
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
        document: dict[str, Any] = json.loads(path.read_text())
        return [Server.model_validate(entry) for entry in (document, *document.get("others", ()))]
    except (OSError, ValueError, ValidationError, AttributeError, TypeError):
        return []


def _lives(server: Server) -> bool | None:
    if server.process is not None:
        return is_alive(server.process)
    try:
        of(server.pid)
    except ProcessLookupError:
        return False
    return True


def _write(home: Path, servers: Sequence[Server]) -> None:
    if not servers:
        (home / SERVERS).unlink(missing_ok=True)
        return
    newest, *others = (server.model_dump(mode="json") for server in servers[:_MOST])
    write_private(home / SERVERS, json.dumps({**newest, "others": others}) + "\n")


@contextlib.contextmanager
def _changing(home: Path) -> Iterator[None]:
    """Alone among the servers of a home; without that where its file system has no locks."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
