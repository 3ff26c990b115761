"""Supervisor's side of a run directory on object storage: a separate process (`object_sync.py`, or
for an engine `engine_sync.py`) moves the files.

It is separate because the supervisor has one thread, imports nothing large, and must not hang when
the storage does.
"""

from __future__ import annotations

import logging
import sys

from ft_service.errors import UnavailableError
from ft_service.host.environment import STORAGE
from ft_service.host.helper_process import HelperFailed, HelperProcess, Program, run_once
from ft_service.rundir.directory import RunDir
from ft_service.rundir.engine import is_engine
from ft_service.shared_work.losses import persist

log = logging.getLogger(__name__)

TRIES = 6
"""Tries of a process that the host kills each time: with a pod's disk goes what was not
uploaded.
"""


class MirrorError(UnavailableError):
    """Failure to fetch the run directory from object storage."""


class Mirror:
    """One node's copy of a run directory, kept in sync with object storage as far as an attempt
    needs it.
    """

    def __init__(self, url: str, run: RunDir, attempt: int, node: int) -> None:
        self._words = [url, str(run.root), str(attempt), str(node)]
        self._module = "engine_sync" if is_engine(run.root) else "object_sync"
        self._follower: HelperProcess | None = None

    def fetch(self) -> None:
        """Download what the attempt starts from. Raises MirrorError."""
        try:
            self._persist("fetch")
        except HelperFailed:
            raise MirrorError(
                "The run directory could not be fetched from object storage; the reason is in the "
                "log above."
            ) from None

    def follow(self) -> None:
        """Start the process that copies changes in both directions until this process ends."""
        self._follower = HelperProcess(self._program("follow"))

    def tend(self) -> None:
        """Restart that process if it has died."""
        if self._follower is not None and (code := self._follower.exit_code) is not None:
            log.warning("the process that keeps object storage up to date ended with code %d", code)
            self._follower.close()
            self.follow()

    def finish(self) -> None:
        """Upload the rest, the exit record last. The log names what could not be uploaded."""
        if self._follower is not None:
            self._follower.close()  # the flush repeats what it was doing
            self._follower = None
        try:
            self._persist("flush")
        except HelperFailed as error:
            log.error("not everything could be uploaded to object storage: %s", error.message)

    def _persist(self, verb: str) -> None:
        """Run the process to its end, and again if the host kills it."""
        persist(f"{self._module} {verb}", lambda: run_once(self._program(verb)), tries=TRIES)

    def _program(self, verb: str) -> Program:
        command = (
            sys.executable,
            "-P",
            "-m",
            f"ft_service.supervisor.{self._module}",
            verb,
            *self._words,
        )
        return Program(command=command, needs=STORAGE, own_errors=False)
