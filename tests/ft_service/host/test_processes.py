from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ft_service.errors import UnavailableError
from ft_service.host import processes
from tests.support.attempts import wait_for


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_alive_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    identity = processes.of(child.pid)
    assert processes.is_alive(identity) is True
    child.kill()
    child.wait()
    assert processes.is_alive(identity) is False
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        processes.of(child.pid)


def test_a_zombie_is_gone(child: subprocess.Popen[bytes]) -> None:
    identity = processes.of(child.pid)
    child.kill()
    wait_for(lambda: not processes.is_alive(identity))
    os.kill(child.pid, 0)  # it is still in the process table: it has not been reaped
    with pytest.raises(ProcessLookupError):
        processes.of(child.pid)


def test_another_process_with_the_same_id_is_neither_alive_nor_killed(
    child: subprocess.Popen[bytes],
) -> None:
    identity = processes.of(child.pid)
    earlier = identity.model_copy(update={"start_ticks": identity.start_ticks - 1})
    assert processes.is_alive(earlier) is False
    assert processes.kill(earlier) is False
    assert processes.is_alive(identity) is True
    assert processes.kill(identity) is True
    assert child.wait() == -signal.SIGKILL


def test_processes_of_another_boot_are_gone_and_those_of_another_namespace_cannot_be_seen() -> None:
    mine = processes.of(os.getpid())
    assert processes.is_alive(mine.model_copy(update={"boot_id": "0"})) is False
    elsewhere = mine.model_copy(update={"pid_namespace": 1})
    assert processes.is_alive(elsewhere) is None
    assert processes.kill(elsewhere) is False


def test_a_command_name_with_parentheses_and_spaces_is_read_right() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "open('/proc/self/comm', 'w').write(') Z 1 (x'); print(flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        identity = processes.of(process.pid)
        assert processes.is_alive(identity) is True
        assert identity.start_ticks > 0


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnavailableError, match=r"Linux only.*darwin"):
        processes.of(os.getpid())
