"""Launcher of attempts on this host, some of which have a seat in an engine: their `start.json` names it.

Such an attempt is started by an order to the engine (and by starting the engine, whose own attempt is like any other), and has
ended when its run directory says so. While it has not, what is observed of the engine holds for it.
"""

from __future__ import annotations

from pathlib import Path

from ft_service.engines.engine_directory import EngineDirectory, engine_of
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running
from ft_service.launcher.liveness import EventAge
from ft_service.launcher.protocol import Launcher, LaunchError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import newest_step
from ft_service.rundir.documents import Control, Exit, ExitReason
from ft_service.spec import JobSpec
from ft_service.supervisor.attempt_outcome import killed_exit, succeeded_exit


class EngineLauncher:
    """A launcher of this host (LocalLauncher) whose attempts may share engines. For one thread."""

    counts = True
    slots_name_gpus = True
    away_seconds = 0.0

    def __init__(self, inner: Launcher, engines_dir: Path) -> None:
        """`engines_dir`: folder of the engines' directories; an attempt that names another folder is not one of an engine."""
        self._inner, self._engines_dir = inner, engines_dir
        self.host, self.slots = inner.host, inner.slots
        self._event_age = EventAge()

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        engine = self._engine_of(attempt)
        if engine is None:
            self._inner.start(attempt, spec)
            return
        if attempt.has_exit():
            return
        engine.order(attempt)
        try:
            self._inner.start(engine.attempt)
        except LaunchError:
            attempt.write_exit(killed_exit(Reason.LAUNCH_FAILED))
            raise

    def observe(self, attempt: Attempt) -> Observation:
        engine = self._engine_of(attempt)
        if engine is None:
            return self._inner.observe(attempt)
        ended = _seat_exit(attempt)
        if ended is None:
            if not engine.has_order(attempt):
                return Absent()
            seen = self._inner.observe(engine.attempt)
            if isinstance(seen, Running):
                return self._event_age.running(attempt)
            if not isinstance(seen, Ended):
                return seen
            engine.settle(seen.exit, attempt)
            ended = _seat_exit(attempt)
        return Ended(ended, newest_step(attempt.run), fault_group=engine.fault_group(attempt))

    def signal(self, attempt: Attempt, control: Control) -> None:
        self._inner.signal(attempt, control)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        """As LocalLauncher; a seat is sealed, and the engine drops it at its next round: its processes are the other seats'
        too."""
        if self._engine_of(attempt) is None:
            self._inner.kill(attempt, reason)
            return
        result = attempt.read_result()
        attempt.write_exit(killed_exit(reason) if result is None else succeeded_exit(result))

    def clean(self, attempt: Attempt) -> None:
        self._inner.clean(attempt)
        self._event_age.forget(attempt)

    def _engine_of(self, attempt: Attempt) -> EngineDirectory | None:
        return engine_of(attempt, self._engines_dir)


def _seat_exit(attempt: Attempt) -> Exit | None:
    """How a seat's attempt ended. Its result counts as success only where the record cannot be read, since an engine writes the
    record last."""
    ended = attempt.read_exit()
    if ended is None or ended.reason is not ExitReason.UNREADABLE:
        return ended
    result = attempt.read_result()
    return ended if result is None else succeeded_exit(result)
