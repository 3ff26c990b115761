from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_service.host import processes
from ft_service.host.lifetime import RANKS_LOCK, SUPERVISOR_PID, is_locked, try_lock, wait_unlocked
from tests.support.attempts import wait_for

TIED = (
    "from ft_service.host.lifetime import *; die_with_parent({}); print('tied', flush=True); "
    "input()"
)
WAITING = """
import signal, threading
from ft_service.host.lifetime import EndCall

call = EndCall()
signal.signal(signal.SIGTERM, lambda *_: call.make())
threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
call.wait()
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def python(code: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )


def test_a_call_to_end_is_heard_though_its_signal_does_not_wake_the_main_thread() -> None:
    with python(WAITING) as waiting:
        try:
            assert waiting.wait(20) == 0
        finally:
            waiting.kill()


def test_a_tied_process_dies_with_its_parent() -> None:
    with python(PARENT, "-c", TIED.format("")) as parent:
        assert parent.stdout is not None
        child = processes.of(int(parent.stdout.readline()))
        parent.kill()
    wait_for(lambda: not processes.is_alive(child))


def test_a_process_whose_parent_is_gone_already_does_not_go_on() -> None:
    with python(TIED.format(1)) as orphan:  # its parent is not the one that it expects
        assert orphan.wait() == -signal.SIGKILL
    with python(TIED.format("")) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"tied\n"


@pytest.mark.parametrize("module", ["workers.train", "workers.engine"])
def test_a_rank_dies_with_its_parent_while_torch_is_imported(module: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import time; print('importing', flush=True); time.sleep(600)"
    )
    path = f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"
    with python(PARENT, "-m", module, str(tmp_path), "1", PYTHONPATH=path) as parent:
        assert parent.stdout is not None
        rank = processes.of(int(parent.stdout.readline()))
        assert processes.is_alive(rank)
        parent.kill()
    wait_for(lambda: not processes.is_alive(rank))


def test_a_rank_whose_torchrun_was_replaced_by_init_does_not_go_on() -> None:
    """Its parent is then not a child of the supervisor."""
    mine = str(os.getpid())
    with python(TIED.format(""), **{SUPERVISOR_PID: mine}) as orphan:
        assert orphan.wait() == -signal.SIGKILL
    with python(PARENT, "-c", TIED.format(""), **{SUPERVISOR_PID: mine}) as torchrun:
        assert torchrun.stdout is not None
        rank = processes.of(int(torchrun.stdout.readline()))
        assert processes.is_alive(rank)
        torchrun.kill()
    wait_for(lambda: not processes.is_alive(rank))


def test_the_rank_lock_is_shared_and_freed_by_death(tmp_path: Path) -> None:
    lock = tmp_path / RANKS_LOCK
    holding = (
        "import sys; from ft_service.host.lifetime import *; hold_rank_lock(sys.argv[1]); "
        "print(flush=True); input()"
    )
    assert not is_locked(lock)
    with python(holding, str(tmp_path)) as one, python(holding, str(tmp_path)) as other:
        for rank in (one, other):
            assert rank.stdout is not None
            rank.stdout.readline()
        one.kill()
        one.wait()
        assert is_locked(lock)
        assert try_lock(lock) is None
        assert not wait_unlocked(lock, 0.0)
        other.kill()
        other.wait()
    assert wait_unlocked(lock, 0.0)


def test_ranks_need_nothing_but_the_standard_library_for_it() -> None:
    code = (
        "import sys; before = set(sys.modules); import ft_service.host.lifetime; "
        "print(*(set(sys.modules) - before))"
    )
    with python(code) as process:
        assert process.stdout is not None
        loaded = {name.partition(".")[0] for name in process.stdout.read().decode().split()}
    assert loaded - sys.stdlib_module_names == {"ft_service"}
