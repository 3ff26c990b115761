"""A run that leaves a process, a port, or a file in the working tree behind has failed.

`make test` has three test processes side by side (`--processes 3`). Each looks for the processes
and ports that its own tests left; the one that forked them looks at the working tree, once they are
done.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.host.quick_imports import begin_imports, end_imports
from tests.support.cpu_budgets import (
    HELD,
    budget_of,
    can_hold,
    crowding,
    over_budget,
    slowness,
)
from tests.support.cpu_seconds import CpuSeconds
from tests.support.environment import forget_settings
from tests.support.ports import listening_sockets
from tests.support.side_by_side import SideBySide

MARK = "FT_TEST_RUN"
"""Environment variable that every process started by this test process inherits."""
OWN_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""They end with this process: the forkserver that ranks are forked from, and its bookkeeper."""
ROOT = Path(__file__).parents[1]
LONG = (
    "tests/e2e/",
    "tests/api/page/",
    "tests/ft_service/store/",
    "tests/ft_service/supervisor/",
    "tests/workers/",
)
"""Begun first, those with the longest pieces before: side by side, test processes then end at about
the same time.
"""
TOGETHER = ("tests/gpu/", "tests/ft_service/store/")
"""Never side by side: tests that share one GPU; tests that share one PostgreSQL, whose start takes
longer than most of them.
"""
SHOWN_FILES = 25
"""Files whose CPU seconds are printed at the end of a run of more, and after them those above their
budgets.
"""

_TREE = pytest.StashKey[set[str]]()
_LEFT = pytest.StashKey[list[str]]()
_CPU = pytest.StashKey[CpuSeconds]()
_SLOWNESS = pytest.StashKey[list[float]]()
_CROWDING = pytest.StashKey[list[float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes", type=int, default=0, help="test processes side by side; 0: this one"
    )
    parser.addoption(
        "--hold-budgets",
        action="store_true",
        help="a file far above its CPU seconds (tests/support/cpu_budgets.py) fails the run, "
        "unless the machine has too much else to do",
    )


def pytest_configure(config: pytest.Config) -> None:
    begin_imports()
    forget_settings()
    os.environ[MARK] = uuid.uuid4().hex
    config.stash[_LEFT], config.stash[_CPU] = [], CpuSeconds()
    config.stash[_SLOWNESS], config.stash[_CROWDING] = [slowness()], [crowding()]
    config.stash[_TREE] = working_tree()
    if processes := config.getoption("--processes"):
        # As many threads of torch as test processes, and not their product.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        # OpenMP's threads do not live on in a process that is forked, which waits for them.
        os.environ["OMP_NUM_THREADS"] = "1"
        # A process that has asked CUDA cannot fork ones that use it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        side_by_side = SideBySide(
            processes,
            TOGETHER,
            lambda: _begin_process(threads),
            lambda: _end_process(config),
            lambda told: _take(config, told),
        )
        config.pluginmanager.register(side_by_side)


def _begin_process(threads: str) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    os.environ["OMP_NUM_THREADS"] = threads
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))


_Told = tuple[list[str], dict[str, float], float, float]


def _end_process(config: pytest.Config) -> _Told:
    """Return what this process's tests left behind, their CPU seconds by file, and how slow the
    processor and how crowded the machine is while others may still run.
    """
    return left_by_this_process(), dict(config.stash[_CPU].of_file), slowness(), crowding()


def _take(config: pytest.Config, told: _Told) -> None:
    left, seconds, slower, crowded = told
    config.stash[_LEFT] += left
    config.stash[_CPU].of_file.update(seconds)
    config.stash[_SLOWNESS].append(slower)
    config.stash[_CROWDING].append(crowded)


@pytest.fixture(autouse=True, scope="session")
def no_helper_is_left() -> Iterator[None]:
    """End the processes that this session has kept for its next attempts and grades, if there were
    any.
    """
    yield
    if (kept_tokens := sys.modules.get("tests.support.training.kept_tokens")) is not None:
        kept_tokens.end_examiner()
    if (text_processes := sys.modules.get("ft_service.graders.text_processes")) is not None:
        text_processes.TEXT_PROCESSES.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next(
            (n for n, folder in enumerate(LONG) if item.nodeid.startswith(folder)), len(LONG)
        )
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with item.config.stash[_CPU].counted(item.location[0]):
        return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    cpu = config.stash[_CPU]
    if len(cpu.of_file) > SHOWN_FILES:
        terminalreporter.write_line(cpu.report(SHOWN_FILES))
    if len(cpu.of_file) > SHOWN_FILES or config.getoption("--hold-budgets"):
        for line in _dear(config):
            terminalreporter.write_line(line)
    crowded = max(config.stash[_CROWDING])
    if config.getoption("--hold-budgets") and not can_hold(crowded):
        terminalreporter.write_line(
            f"Budgets are not held: the load average was {crowded:.1f} for each processor."
        )


def _dear(config: pytest.Config) -> list[str]:
    """Return a line for each file that took too much. The slowest of the run's own measures of the
    processor counts.
    """
    seconds = config.stash[_CPU].of_file
    slowest = max(config.stash[_SLOWNESS])
    return [
        f"{file} took {seconds[file]:.1f} CPU seconds, {times:.1f} times its budget of "
        f"{budget_of(file)} on a processor {slowest:.1f} times as slow as theirs: share a fixture, "
        "use smaller shapes, or remove cases that a lower test has"
        for file, times in over_budget(seconds, slowest).items()
    ]


def _breaks_budgets(config: pytest.Config) -> bool:
    """Return whether the run fails by its CPU seconds."""
    if not config.getoption("--hold-budgets") or not can_hold(max(config.stash[_CROWDING])):
        return False
    slowest = max(config.stash[_SLOWNESS])
    return bool(over_budget(config.stash[_CPU].of_file, slowest, HELD))


def pytest_collection_finish() -> None:
    end_imports()


@pytest.hookimpl(trylast=True)  # fixtures of the session have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    left = session.config.stash[_LEFT] + left_by_this_process()
    left += [f"file {line[3:]}" for line in sorted(working_tree() - session.config.stash[_TREE])]
    if left or _breaks_budgets(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if session.config.pluginmanager.hasplugin("cacheprovider"):
            # `make test-failed` finds nothing then, and fails: no test alone is to blame.
            session.config.cache.set("cache/lastfailed", {})
    if left:
        # Forked processes share a port.
        print("\nThis run has left behind:", *dict.fromkeys(left), sep="\n  ")


def left_by_this_process() -> list[str]:
    """Processes and ports that this process's tests have left."""
    processes = [f"process {pid}: {command}" for pid, command in processes_of_this_run().items()]
    return processes + [
        f"port {port}, on which a test still listens"
        for port in listening_sockets(os.getpid()).values()
    ]


def working_tree() -> set[str]:
    """What git says of changed and new files; empty where there is no git or no checkout."""
    if shutil.which("git") is None:
        return set()
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=all"]
    return set(
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    )


def processes_of_this_run() -> dict[int, str]:
    """Living processes that carry this process's mark, other than itself and its helpers."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            command = (
                (entry / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if (
            marked
            and int(entry.name) != os.getpid()
            and not any(helper in command for helper in OWN_HELPERS)
        ):
            found[int(entry.name)] = command[:200]
    return found
