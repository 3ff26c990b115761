"""Attempts that exist in memory only: for tests, and to try the service without training anything.

Nothing happens by itself. A test says what the workers would do (`report`, `end`, `set`) and looks
at what was asked of them (`started`, `signals`, `kills`).
"""

from __future__ import annotations

from collections.abc import Callable

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason
from ft_service.spec import JobSpec

Key = tuple[str, int]
"""The job's id and the attempt's number."""


class FakeLauncher:
    """A place of `slots` ranks whose attempts do what they are told."""

    def __init__(self, slots: int = 2, *, host: str = "fake") -> None:
        self._slots = slots
        self._host = host
        self._seen: dict[Key, Observation] = {}
        self.started: list[Key] = []
        """Attempts that came into being, in order; starting one again adds nothing."""
        self.signals: list[tuple[str, int, Control]] = []
        self.kills: list[tuple[str, int, Reason]] = []
        self.cleaned: list[Key] = []
        self.away_seconds = 0.0
        self.refusal: str | None = None
        """If set, `start` raises LaunchError with this message."""
        self.on_start: Callable[[Attempt], None] | None = None
        """Called for each attempt that comes into being; may write what its workers would."""

    @property
    def host(self) -> str:
        return self._host

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def counts(self) -> bool:
        return True

    @property
    def slots_name_gpus(self) -> bool:
        return True

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        if self.refusal is not None:
            raise LaunchError(self.refusal)
        key = _key(attempt)
        if key in self._seen:
            return
        self._seen[key] = Running()
        self.started.append(key)
        if self.on_start is not None:
            self.on_start(attempt)

    def observe(self, attempt: Attempt) -> Observation:
        return self._seen.get(_key(attempt), Absent())

    def signal(self, attempt: Attempt, control: Control) -> None:
        self.signals.append((*_key(attempt), control))
        if control.desired is Desired.CANCEL and isinstance(self.observe(attempt), Running):
            self.end(*_key(attempt), exit_of(ExitReason.CANCELLED, "The attempt was cancelled."))

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        self.kills.append((*_key(attempt), reason))
        if not isinstance(self.observe(attempt), Ended):
            reasons = {
                Reason.STALLED: ExitReason.STALLED,
                Reason.STOP_TIMEOUT: ExitReason.STOP_TIMEOUT,
                Reason.USER_CANCELLED: ExitReason.CANCELLED,
            }
            ended = exit_of(
                reasons.get(reason, ExitReason.WORKER_KILLED), "The service ended the attempt."
            )
            self.end(*_key(attempt), ended)

    def clean(self, attempt: Attempt) -> None:
        self.cleaned.append(_key(attempt))

    def report(self, job_id: str, attempt: int, silent_seconds: float = 0.0) -> None:
        """The attempt lives and has written events."""
        self.set(job_id, attempt, Running(reported=True, silent_seconds=silent_seconds))

    def end(self, job_id: str, attempt: int, exit: Exit | None, checkpoint_step: int = -1) -> None:
        """The attempt's processes are gone; None: without an exit record."""
        self.set(job_id, attempt, Ended(exit, checkpoint_step))

    def set(self, job_id: str, attempt: int, seen: Observation) -> None:
        """Whatever else `observe` is to answer from now on."""
        self._seen[job_id, attempt] = seen


def _key(attempt: Attempt) -> Key:
    return attempt.job_id, attempt.number
