"""Attempts for tests: run directories whose workers follow a script
(`programs/scripted_worker.py`), and their processes.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ft_service.host import processes
from ft_service.host.processes import ProcessIdentity
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Start

Value = TypeVar("Value")
HANG_SECONDS = 300.0
"""How long something is waited for that is certain to come, unless it hangs: on a busy machine,
too.
"""
LONGEST_PAUSE = 0.25
"""The longest pause of `wait_for` in seconds, unless its caller asks for longer ones."""
WORKER = Path(__file__).parent / "programs/scripted_worker.py"


def scripted(script: str) -> list[str]:
    """The command of a worker that follows this script."""
    return [sys.executable, str(WORKER), script]


def new_run(folder: Path, attempt: int = 1, job_id: str = "ftjob-test") -> RunDir:
    """A run directory in which one attempt is ready to be started."""
    run = RunDir(folder)
    write_start(run, attempt, job_id)
    return run


def write_start(run: RunDir, attempt: int, job_id: str = "ftjob-test") -> None:
    start = Start(job_id=job_id, attempt=attempt, world_size=2, generation=1, checkpoint=None)
    run.write_if_absent(f"attempts/{attempt}/start.json", start)


def wait_for(
    what: Callable[[], Value | None], seconds: float = HANG_SECONDS, *, every: float = 0.02
) -> Value:
    """The first answer that is true: neither None nor empty.

    Fails the test if none comes in time. `every`: the shortest pause.

    The pauses grow with the time waited, since questions take processor time from what is waited
    for.
    """
    began = time.monotonic()
    while True:
        # Before the look, so that the last one comes when the time is over.
        waited = time.monotonic() - began
        if value := what():
            return value
        assert waited < seconds, f"did not happen within {seconds:g} seconds: {source_of(what)}"
        time.sleep(max(every, min(LONGEST_PAUSE, waited / 10)))


def source_of(what: Callable[..., Any]) -> str:
    """What a condition that is waited for says, and where: for the failure of a test whose
    condition has not come true.
    """
    inner = inspect.unwrap(what)
    try:
        place = f"{Path(inspect.getfile(inner)).name}:{inspect.getsourcelines(inner)[1]}"
        return f"{inspect.getsource(inner).strip()} ({place})"
    except (
        OSError,
        TypeError,
    ):  # a method of an object that is not written in Python, or a partial function
        return repr(what)


def process_of(run: RunDir, name: str) -> ProcessIdentity:
    """Identity of a scripted process (`<attempt>-torchrun`, `<attempt>-<rank>`), once it has said
    its number.
    """
    body = wait_for(lambda: run.get(f"pids/{name}"))
    return processes.of(int(body))


def supervisor_of(run: RunDir, attempt: int = 1) -> ProcessIdentity:
    return wait_for(lambda: run.read(f"attempts/{attempt}/supervisor.json", ProcessIdentity))


def all_processes(run: RunDir, attempt: int = 1) -> list[ProcessIdentity]:
    """The attempt's supervisor, torchrun and both ranks, once they all live."""
    return [
        supervisor_of(run, attempt),
        *(process_of(run, f"{attempt}-{name}") for name in ("torchrun", "0", "1")),
    ]


def gone(identities: list[ProcessIdentity]) -> bool:
    return not any(processes.is_alive(identity) for identity in identities)


def family(pid: int) -> list[int]:
    """A process and all that descend from it, parents first."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(
                int(path.parent.name)
            )
    members = [pid]
    for member in members:
        members += parents.get(member, [])
    return members


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def digests(folder: Path, *names: str) -> dict[str, str]:
    """SHA-256 of every file below these names, by its path."""
    paths = [
        path
        for name in names
        for path in (folder / name, *(folder / name).rglob("*"))
        if path.is_file()
    ]
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}


def starts(run: RunDir, attempt: int) -> int:
    """How often the attempt's torchrun was started."""
    return len((run.get(f"starts/{attempt}") or b"").splitlines())


def kill_leftovers(folder: Path) -> None:
    """End all processes that a failed test left: supervisors first, so that they do not wait for
    the rest.
    """
    for path in folder.rglob("attempts/*/supervisor.json"):
        supervisor = RunDir(path.parent).readable(path.name, ProcessIdentity)
        if supervisor is None:  # a test's own garbage
            continue
        if supervisor.pid != os.getpid():  # a test may itself play the supervisor
            processes.kill(supervisor)
    for path in folder.rglob("pids/*"):
        pid = int(path.read_text())
        if _is_scripted(pid):
            os.kill(pid, signal.SIGKILL)


def _is_scripted(pid: int) -> bool:
    try:
        return str(WORKER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
