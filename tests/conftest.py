"""A run that leaves a process, or a file in the working tree, behind has failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

MARK = "FT_TEST_RUN"
"""Environment variable that every process started by this run inherits."""
OWN_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""They end with this process: the forkserver that ranks are forked from, and its bookkeeper."""
ROOT = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    config.stash[_TREE] = working_tree()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    left = [f"process {pid}: {command}" for pid, command in processes_of_this_run().items()]
    left += [f"file {line[3:]}" for line in sorted(working_tree() - session.config.stash[_TREE])]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nThis run has left behind:", *left, sep="\n  ")


_TREE = pytest.StashKey[set[str]]()


def working_tree() -> set[str]:
    """What git says of changed and new files; empty where there is no git or no checkout."""
    if shutil.which("git") is None:
        return set()
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=all"]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())


def processes_of_this_run() -> dict[int, str]:
    """Living processes that carry this run's mark, other than this one and its helpers."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if marked and int(entry.name) != os.getpid() and not any(helper in command for helper in OWN_HELPERS):
            found[int(entry.name)] = command[:200]
    return found
