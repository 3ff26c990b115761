"""Launcher of attempts, some of which have a seat in an engine: their `start.json` names it.

Such an attempt is started by an order to the engine (and by starting the engine, whose own attempt
is like any other), and has ended when its run directory says so. While it has not, what is observed
of the engine holds for it. Only the engine is known to the place where attempts run, so requests
for a seat go by files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ft_service.engines.engine_directory import EngineDirectory, engine_of
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running, Unknown
from ft_service.launcher.liveness import EventAge
from ft_service.launcher.protocol import Launcher, LaunchError, ListedAttempt, ListsAttempts
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of, killed_exit, succeeded_exit
from ft_service.rundir.checkpoints import newest_step
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places

Show = Callable[[EngineDirectory, JobSpec], None]
"""Lets the ranks of an engine see the data of a job."""


_HANGS = (Reason.STALLED, Reason.STOP_TIMEOUT)
"""Reasons to kill a seat whose engine has not let it go on for long, which `SeatThread.resume`
would report: a rank hangs.
"""


class EngineLauncher:
    """A launcher whose attempts may share engines. For one thread."""

    def __init__(self, inner: Launcher, places: Places, show: Show | None = None) -> None:
        """`places`: of the engines' directories; an attempt that names another folder is not one
        of an engine. `show`: None: the ranks see all data, or their node fetches it.
        """
        self._inner = inner
        self._places = places
        self._show = show
        self.host = inner.host
        self.slots = inner.slots
        self.counts = inner.counts
        self.slots_name_gpus = inner.slots_name_gpus
        self._event_age = EventAge()

    @property
    def away_seconds(self) -> float:
        return self._inner.away_seconds

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        engine = self._engine_of(attempt)
        if engine is None:
            self._inner.start(attempt, spec)
            return
        if attempt.has_exit():
            return
        try:
            if self._show is not None and spec is not None:
                self._show(engine, spec)
            engine.order(attempt)
            if not engine.attempt.has_launched():  # else a cluster has it, or has lost it
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
            if isinstance(seen, Running) and (seen.admitted or not _end_unstarted(attempt)):
                return self._running(attempt, seen)
            if isinstance(seen, Absent | Unknown):
                return seen
            if isinstance(seen, Ended):
                engine.settle(seen.exit, attempt)
            ended = _seat_exit(attempt)
        return Ended(
            ended,
            newest_step(attempt.run),
            self._delay(engine, attempt),
            engine.fault_group(attempt),
        )

    def _running(self, attempt: Attempt, seen: Running) -> Running:
        """What is observed of a seat whose engine is seen so; its time begins when the engine has
        its place.
        """
        if not seen.admitted:
            self._event_age.forget(attempt)
            return replace(seen, silent_seconds=0.0)
        own = self._event_age.running(attempt)
        return replace(seen, reported=own.reported, silent_seconds=own.silent_seconds)

    def _delay(self, engine: EngineDirectory, attempt: Attempt) -> float:
        """Seconds before the next attempt of a job, if its engine got no place."""
        ended = attempt.read_exit()
        if (
            ended is None
            or ended.reason is not ExitReason.STOPPED
            or attempt.has_segment(0)
            or engine.attempt.has_outcome()
        ):
            return 0.0
        seen = self._inner.observe(engine.attempt)
        return seen.delay_seconds if isinstance(seen, Ended) else 0.0

    def signal(self, attempt: Attempt, control: Control) -> None:
        """As the inner launcher; a seat's request is a file, which the engine reads once it runs,
        and `observe` until then.
        """
        if self._engine_of(attempt) is None:
            self._inner.signal(attempt, control)
        else:
            attempt.write_control(control)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        """As the inner launcher; a seat is sealed, and the engine drops it at its next round: its
        processes are those of the other seats too. Where they hang (`_HANGS`) the engine is killed,
        and its seats are lost with it.
        """
        engine = self._engine_of(attempt)
        if engine is None or (reason in _HANGS and engine.has_order(attempt)):
            self._inner.kill(attempt if engine is None else engine.attempt, reason)
            return
        result = attempt.read_result()
        attempt.write_exit(killed_exit(reason) if result is None else succeeded_exit(result))

    def clean(self, attempt: Attempt) -> None:
        if self._engine_of(attempt) is None:
            self._inner.clean(attempt)
        self._event_age.forget(attempt)

    def _engine_of(self, attempt: Attempt) -> EngineDirectory | None:
        return engine_of(attempt, self._places)


class ClusterEngineLauncher(EngineLauncher):
    """A launcher of a cluster, which lists what runs there, whose attempts may share engines."""

    def __init__(self, inner: Launcher, places: Places, show: Show | None = None) -> None:
        super().__init__(inner, places, show)
        assert isinstance(inner, ListsAttempts)
        self._place: ListsAttempts = inner

    def unfinished(self) -> Sequence[ListedAttempt]:
        return self._place.unfinished()

    def end_unfinished(self, name: str) -> None:
        self._place.end_unfinished(name)

    def close(self) -> None:
        self._place.close()


def _end_unstarted(attempt: Attempt) -> bool:
    """End a seat that is asked to stop, whose engine has no place yet.

    False: it is not asked to.
    """
    control = attempt.run.readable(attempt.keys.control, Control)
    if control is None or control.desired is Desired.RUN:
        return False
    stopped = exit_of(ExitReason.STOPPED, "The attempt was stopped before it started.")
    attempt.write_exit(
        stopped if control.desired is Desired.PAUSE else killed_exit(Reason.USER_CANCELLED)
    )
    return True


def _seat_exit(attempt: Attempt) -> Exit | None:
    """How a seat's attempt ended.

    Its result counts as success only where the record cannot be read, since an engine writes the
    record last.
    """
    ended = attempt.read_exit()
    if ended is None or ended.reason is not ExitReason.UNREADABLE:
        return ended
    result = attempt.read_result()
    return ended if result is None else succeeded_exit(result)
