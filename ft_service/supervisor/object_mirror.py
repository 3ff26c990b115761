"""The supervisor's side of a run directory on object storage: a process of its own (`object_sync.py`) moves the files.

Of its own, because the supervisor has one thread, imports nothing large, and must not hang when the storage does.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

from ft_service.errors import UnavailableError
from ft_service.host.environment import STORAGE, child_environment
from ft_service.host.lifetime import die_with_parent
from ft_service.rundir.directory import RunDir

log = logging.getLogger(__name__)


class MirrorError(UnavailableError):
    """The run directory could not be brought here from object storage."""


class Mirror:
    """Keeps one node's copy of a run directory and the one on object storage the same, as far as an attempt needs it."""

    def __init__(self, url: str, run: RunDir, attempt: int, node: int) -> None:
        self._words = [url, str(run.root), str(attempt), str(node)]
        self._follower: subprocess.Popen[bytes] | None = None

    def fetch(self) -> None:
        """Bring here what the attempt starts from. Raises MirrorError."""
        if self._run("fetch").wait():
            raise MirrorError("The run directory could not be fetched from object storage; the reason is in the log above.")

    def follow(self) -> None:
        """From now on, as long as this process lives, pass on what changes on either side."""
        self._follower = self._run("follow")

    def tend(self) -> None:
        """Start the follower again if it has died."""
        if self._follower is not None and self._follower.poll() is not None:
            log.warning("the process that keeps object storage up to date ended with code %d", self._follower.returncode)
            self.follow()

    def finish(self) -> None:
        """Bring the rest there, the exit record last. What cannot be brought there is told in the log."""
        if self._follower is not None:
            self._follower.kill()  # whatever it was at, the flush does again
            self._follower.wait()
            self._follower = None
        if self._run("flush").wait():
            log.error("not everything could be brought to object storage")

    def _run(self, verb: str) -> subprocess.Popen[bytes]:
        supervisor = os.getpid()
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ft_service.supervisor.object_sync", verb, *self._words],
            env=child_environment(os.environ, *STORAGE),
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(supervisor),  # one thread here too
        )
