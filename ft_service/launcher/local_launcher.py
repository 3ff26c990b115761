"""Attempts as processes of this host: one supervisor per attempt, which outlives the service, and
its ranks.

Locks and process identities alone say what is alive, so a restarted service finds its attempts
although it is not their parent. The launcher takes the supervisor's lock and hands it over as an
open file: from `start` until the supervisor's death the attempt never looks free.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ft_service.host import processes
from ft_service.host.environment import child_environment
from ft_service.host.lifetime import RANKS_LOCK, is_locked, require_linux, try_lock, wait_unlocked
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Unknown
from ft_service.launcher.liveness import EventAge
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.attempt import Attempt, unreadable_exit
from ft_service.rundir.attempt_outcome import killed_exit, signal_name, succeeded_exit
from ft_service.rundir.checkpoints import newest_step
from ft_service.rundir.directory import UnreadableDocumentError
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason
from ft_service.spec import JobSpec
from ft_service.supervisor.command_line import DEFAULT_GRACE_SECONDS, SupervisorOptions, program
from ft_service.supervisor.torchrun import tail

log = logging.getLogger(__name__)

SPAWN_SECONDS = 60.0
"""How long a new supervisor may take to detach itself."""
KILL_SECONDS = 10.0
"""How long `kill` waits for killed processes; the next call deals with those that are still
alive.
"""
_MACHINE_ID = Path("/etc/machine-id")


def host_id() -> str:
    """Stable name of this host: its machine id, or its host name where it has none."""
    machine = _MACHINE_ID.read_text(encoding="utf-8").strip() if _MACHINE_ID.is_file() else ""
    return machine or platform.node()


class LocalLauncher:
    """Runs up to `slots` ranks on this host. For one thread."""

    counts = True
    slots_name_gpus = True
    away_seconds = 0.0

    def __init__(
        self,
        slots: int,
        *,
        stop_grace_seconds: float = DEFAULT_GRACE_SECONDS,
        worker_command: Sequence[str] = (),
        host: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker_command`: what supervisors run instead of torchrun with our workers.

        Raises UnavailableError off Linux.
        """
        require_linux()
        self.host = host or host_id()
        self.slots = slots
        self._options = SupervisorOptions(
            grace_seconds=stop_grace_seconds, worker_command=worker_command, detach=True
        )
        self._event_age = EventAge(clock)

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        files = attempt.node()
        lock = try_lock(files.lock)
        if lock is None:
            return
        try:
            try:
                if not (files.has_supervisor() or files.has_exit() or attempt.has_exit()):
                    self._spawn(attempt, lock)
            finally:
                os.close(lock)  # held by this process, it would look like a supervisor's
        except LaunchError:
            self.kill(attempt, Reason.LAUNCH_FAILED)  # half a start must not come to life later
            raise

    def observe(self, attempt: Attempt) -> Observation:
        files = attempt.node()
        ended = _exit_record(attempt)
        if ended is None and is_locked(files.lock):
            return self._event_age.running(attempt)
        if ended is None:
            supervisor = None
            unreadable = None
            try:
                supervisor = files.read_supervisor()
                if supervisor is None:
                    return Absent()
            except UnreadableDocumentError as error:  # its lock is free: that supervisor is gone
                unreadable = unreadable_exit(error)
            # It may have written its record and ended after the first read and before the test of
            # the lock.
            ended = _exit_record(attempt) or unreadable
            if ended is None and supervisor is not None and processes.is_alive(supervisor):
                return Unknown(f"supervisor {supervisor.pid} is alive and does not hold its lock")
        if ended is None and is_locked(_ranks_lock(attempt)):
            return Unknown("the supervisor is gone and a rank is still alive")
        return Ended(ended, newest_step(attempt.run))

    def signal(self, attempt: Attempt, control: Control) -> None:
        attempt.write_control(control)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        lock = attempt.node().lock
        if is_locked(lock):
            _kill_supervisor(attempt)
        if wait_unlocked(lock, KILL_SECONDS) and wait_unlocked(_ranks_lock(attempt), KILL_SECONDS):
            _seal(attempt, reason)
        else:
            log.warning("%s: its processes are not gone yet", attempt)

    def clean(self, attempt: Attempt) -> None:
        self._event_age.forget(attempt)

    def _spawn(self, attempt: Attempt, lock: int) -> None:
        output = attempt.node().supervisor_log
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with output.open("ab") as file:
                code = subprocess.run(
                    [
                        *program(),
                        *self._options.arguments(attempt.run.root, attempt.number, lock_fd=lock),
                    ],
                    cwd=attempt.run.root,
                    env=child_environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[lock],
                    timeout=SPAWN_SECONDS,
                    check=False,
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"The supervisor could not be started: {error}.") from error
        if code < 0:
            raise LaunchError(
                f"The supervisor was killed by {signal_name(-code)} while it started."
            )
        if code:
            said = tail(output, 3).strip()
            raise LaunchError(
                "The supervisor could not be started (exit code "
                f"{code}){f': {said}' if said else '.'}"
            )


def _ranks_lock(attempt: Attempt) -> Path:
    """The lock that every living rank holds."""
    return attempt.run.path(RANKS_LOCK)


def _kill_supervisor(attempt: Attempt) -> None:
    try:
        supervisor = attempt.node().read_supervisor()
    except (
        UnreadableDocumentError
    ) as error:  # it cannot be killed by its identity, so it has to end itself
        log.warning("%s: %s", attempt, error.message)
        attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
        return
    if supervisor is None or not processes.kill(supervisor):
        log.warning("%s: its supervisor cannot be reached yet", attempt)


def _exit_record(attempt: Attempt) -> Exit | None:
    """How the attempt ended.

    A result counts as a record of success, and comes before a record that cannot be read.
    """
    files = attempt.node()
    ended = files.read_exit()
    if ended is not None and ended.reason is not ExitReason.UNREADABLE:
        return ended
    if is_locked(files.lock):
        return None
    result = attempt.read_result()
    return ended if result is None else succeeded_exit(result)


def _seal(attempt: Attempt, reason: Reason) -> None:
    """Write an exit record under the lock: a supervisor that starts later finds it and does
    nothing.
    """
    lock = try_lock(attempt.node().lock)
    if lock is None:
        return
    try:
        result = attempt.read_result()
        attempt.node().write_exit(killed_exit(reason) if result is None else succeeded_exit(result))
    finally:
        os.close(lock)
