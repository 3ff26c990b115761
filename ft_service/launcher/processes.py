"""The processes of an attempt on this host: a supervisor of its own that outlives whoever started it, and the ranks below.

What lives is told from locks and process identities only, so that a restarted service finds its attempts again without having
been their parent. The supervisor's lock is taken here and handed to it as an open file: from `start` on until its death there
is no moment in which the attempt looks free.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_service.host import processes
from ft_service.host.environment import STORAGE, child_environment
from ft_service.host.lifetime import RANKS_LOCK, is_locked, try_lock, wait_unlocked
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Running, Unknown
from ft_service.launcher.base import LaunchError
from ft_service.rundir.attempt import Attempt, AttemptNode, unreadable_exit
from ft_service.rundir.checkpoints import newest_step
from ft_service.rundir.directory import UnreadableDocumentError
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason, Result, Start
from ft_service.supervisor import command_line
from ft_service.supervisor.node import Node
from ft_service.supervisor.torchrun import tail
from ft_service.supervisor.verdict import exit_of, killed_exit

log = logging.getLogger(__name__)

SPAWN_SECONDS = 60.0
"""How long a new supervisor may take to detach itself."""
KILL_SECONDS = 10.0
"""How long `kill` waits for killed processes; what still lives then is left for the next call."""


@dataclass(frozen=True)
class Share:
    """What this host has of an attempt: all of it, or a node."""

    attempt: Attempt
    files: AttemptNode
    lock: Path
    """Held by the supervisor as long as it lives."""
    ranks: Path
    """Held by every living rank."""
    whole: bool = True
    """The attempt has no other nodes: what ends here is its end."""

    @classmethod
    def of_attempt(cls, attempt: Attempt) -> Share:
        """All of an attempt, whose locks lie in the run directory."""
        files = attempt.node()
        return cls(attempt, files, files.lock, attempt.run.path(RANKS_LOCK))

    @classmethod
    def of_node(cls, attempt: Attempt, node: Node, start: Start) -> Share:
        """A node of an attempt, whose locks lie in the node's scratch folder."""
        run = attempt.run
        return cls(attempt, node.files(run, start), node.lock(run, start), node.ranks_lock(run, start), start.nodes == 1)

    def start(self, options: Mapping[str, Any], handed_over: Callable[[int], bool] = lambda lock: False) -> None:
        """Start it, unless it was started before. `options`: of `command_line.arguments`. `handed_over`: whether somebody else
        has taken the lock and supervises. Raises LaunchError."""
        lock = try_lock(self.lock)
        if lock is None:
            return
        try:
            if not self._was_run() and not handed_over(lock):
                self._spawn(options, lock)
        except LaunchError:
            os.close(lock)
            self.kill(Reason.LAUNCH_FAILED)  # half a start must not come to life later
            raise
        os.close(lock)

    def observe(self, running: Callable[[], Running] = Running) -> Running | Ended | Absent | Unknown:
        """What has become of it. `running`: what is said of it while it lives."""
        ended = self._exit_record()
        if ended is None and is_locked(self.lock):
            return running()
        if ended is None:
            try:
                supervisor = self.files.read_supervisor()
                if supervisor is None:
                    return Absent()
            except UnreadableDocumentError as error:  # its lock is free: whoever it was is gone
                supervisor, unreadable = None, unreadable_exit(error)
            else:
                unreadable = None
            # Between the first look and the test of the lock it may have written its record and gone.
            ended = self._exit_record() or unreadable
            if ended is None and supervisor is not None and processes.is_alive(supervisor):
                return Unknown(f"supervisor {supervisor.pid} lives and does not hold its lock")
        if ended is None and is_locked(self.ranks):
            return Unknown("the supervisor is gone and a rank still lives")
        return Ended(ended, newest_step(self.attempt.run))

    def kill(self, reason: Reason) -> bool:
        """End its processes now and leave an exit record with this reason. False: they are not gone yet."""
        if is_locked(self.lock):
            self._kill_supervisor()
        if not wait_unlocked(self.lock, KILL_SECONDS) or not wait_unlocked(self.ranks, KILL_SECONDS):
            log.warning("%s: its processes are not gone yet", self.attempt)
            return False
        self._seal(reason)
        return True

    def _kill_supervisor(self) -> None:
        try:
            supervisor = self.files.read_supervisor()
        except UnreadableDocumentError as error:  # it is asked to end itself
            log.warning("%s: %s", self.attempt, error.message)
            self.attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
            return
        if supervisor is None or not processes.kill(supervisor):
            log.warning("%s: its supervisor cannot be reached yet", self.attempt)

    def is_supervised(self) -> bool:
        """Whether its supervisor lives, which brings what it leaves to object storage when it has ended."""
        return is_locked(self.lock)

    def is_alive(self) -> bool:
        """Whether any process of it lives."""
        return is_locked(self.lock) or is_locked(self.ranks)

    def _was_run(self) -> bool:
        return self.files.has_supervisor() or self.files.has_exit() or self.attempt.has_exit()

    def _exit_record(self) -> Exit | None:
        """How it ended; a result that it left is as good as a record, and better than one that cannot be read."""
        ended = self.files.read_exit()
        if not self.whole or (ended is not None and ended.reason is not ExitReason.UNREADABLE):
            return ended
        if is_locked(self.lock):
            return None
        result = self.attempt.read_result()
        return ended if result is None else _succeeded(result)

    def _seal(self, reason: Reason) -> None:
        """Leave an exit record, under the lock: a supervisor that comes later finds it and does nothing."""
        lock = try_lock(self.lock)
        if lock is None:
            return
        try:
            result = self.attempt.read_result()
            self.files.write_exit(killed_exit(reason) if result is None else _succeeded(result))
        finally:
            os.close(lock)

    def _spawn(self, options: Mapping[str, Any], lock: int) -> None:
        run = self.attempt.run
        output = self.files.supervisor_log
        output.parent.mkdir(parents=True, exist_ok=True)
        words = command_line.arguments(run.root, self.attempt.number, lock_fd=lock, detach=True, **options)
        try:
            with output.open("ab") as file:
                code = subprocess.run(
                    [*command_line.program(), *words],
                    cwd=run.root,
                    env=child_environment(os.environ, *(STORAGE if options.get("mirror") else ())),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[lock],
                    timeout=SPAWN_SECONDS,
                    check=False,
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"The supervisor could not be started: {error}.") from error
        if code:
            raise LaunchError(f"The supervisor could not be started (exit code {code}): {tail(output, 3)}")


def _succeeded(result: Result) -> Exit:
    return exit_of(ExitReason.SUCCEEDED, f"Training has finished after {result.steps} steps.")
