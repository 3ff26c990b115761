"""Attempts as processes of this host, which is the service's own (processes.py)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ft_service.host.lifetime import require_linux
from ft_service.jobs.line import Host
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Observation
from ft_service.launcher.processes import Share
from ft_service.launcher.silence import Silence
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import Control
from ft_service.spec import JobSpec
from ft_service.supervisor.command_line import DEFAULT_GRACE_SECONDS
from ft_service.supervisor.warm_start import Standby

_MACHINE_ID = Path("/etc/machine-id")


def host_id() -> str:
    """Stable name of this host: its machine id, or its host name where it has none."""
    machine = _MACHINE_ID.read_text().strip() if _MACHINE_ID.is_file() else ""
    return machine or platform.node()


class LocalLauncher:
    """Runs up to `slots` ranks on this host. For one thread."""

    def __init__(
        self,
        slots: int,
        *,
        stop_grace_seconds: float = DEFAULT_GRACE_SECONDS,
        worker_command: Sequence[str] | None = None,
        standby: Standby | None = None,
        host: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker_command`: what supervisors run instead of torchrun with our workers. `standby`: a supervisor that waits with
        preloaded workers; None: every attempt starts cold. Raises UnavailableError off Linux."""
        require_linux()
        self._host = host or host_id()
        self._slots = slots
        self._grace = stop_grace_seconds
        self._worker_command = worker_command
        self._standby = standby
        self._silence = Silence(clock)

    @property
    def host(self) -> str:
        return self._host

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def hosts(self) -> Mapping[str, Host]:
        return {self.host: Host(slots=self._slots)}

    @property
    def away_seconds(self) -> float:
        """0: this host is always there."""
        return 0.0

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        def handed_over(lock: int) -> bool:
            return self._standby is not None and self._standby.hand_over(attempt.run, attempt.number, lock)

        options = {"grace_seconds": self._grace, "worker_command": self._worker_command or ()}
        Share.of_attempt(attempt).start(options, handed_over)

    def observe(self, attempt: Attempt) -> Observation:
        return Share.of_attempt(attempt).observe(lambda: self._silence.running(attempt))

    def signal(self, attempt: Attempt, control: Control) -> None:
        attempt.write_control(control)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        Share.of_attempt(attempt).kill(reason)

    def clean(self, attempt: Attempt) -> None:
        """Its processes are gone, and its files are the job's."""
        self._silence.forget(attempt)
