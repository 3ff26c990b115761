from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.host import port_owner


def loopback() -> tuple[str, socket.AddressFamily]:
    """An address of this machine, of IPv6 if it has that."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1", socket.AF_INET
    return "::1", socket.AF_INET6


LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def port_of_a_server(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A process that is called as a server of this service is, and listens: its port and its id."""
    program = tmp_path / "bin" / "ft"
    program.parent.mkdir()
    program.write_text(LISTEN)
    environment = {"FT_HOME": "state", "HOME": "/nowhere"}
    command = [sys.executable, str(program), "serve"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
        process.communicate("")


def test_a_server_is_named_by_its_home(port_of_a_server: tuple[int, int], tmp_path: Path) -> None:
    port, pid = port_of_a_server
    assert port_owner.holder(port) == f"the server of {tmp_path / 'state'} (process {pid})"


def test_any_other_process_is_named_by_its_command() -> None:
    address, family = loopback()
    with socket.create_server((address, 0), family=family) as listener:
        said = port_owner.holder(listener.getsockname()[1])
    assert said.startswith(f"process {os.getpid()}: ")
    assert len(said) < 100


def test_what_cannot_be_seen_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Path:
        raise PermissionError

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(Path, "readlink", refuse)
        assert port_owner.holder(listener.getsockname()[1]) == "another program"
