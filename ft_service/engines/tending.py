"""Looks after the engines of one place besides their jobs: their directories, their end, and the
slots that they hold.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from ft_service.engines.engine_directory import EngineDirectory
from ft_service.errors import UnavailableError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Job, Running
from ft_service.launcher.protocol import Launcher
from ft_service.logs import fields
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places
from ft_service.store.engines import EngineRecord
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

TEND_SECONDS = 0.5
"""Interval at which engines are looked at."""
TEND_OBJECTS_SECONDS = 3.0
"""The same with FT_STORAGE, where each look is some requests that are paid for."""
IDLE_SECONDS = 60.0
"""How long an engine stays without a job."""


@dataclass(frozen=True)
class EngineOptions:
    """What engines a place may have."""

    most_seats: int = 0
    """Most jobs that an engine trains at once; 0: no engine is started, and no job joins one."""
    idle_seconds: float = IDLE_SECONDS
    """How long an engine stays without a job."""
    mounts: bool = False
    """Whether ranks see only what is mounted for them (Kubernetes without FT_STORAGE).

    Then the run directories of jobs with a seat are in the folder of their project, and jobs that
    continue an adapter run alone.
    """


class EngineTending:
    """Tends the engines of one place. For the reconciler's thread."""

    def __init__(
        self, store: Store, launcher: Launcher, places: Places, options: EngineOptions
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._places = places
        self.options = options
        self._next = 0.0

    def attend(self) -> None:
        """Look at every engine now and then.

        Raises UnavailableError if the database does not answer.
        """
        if time.monotonic() < self._next:
            return
        for engine in self._store.engines.live_engines(host=self._launcher.host):
            try:
                self._tend(engine)
            except Exception as error:  # one engine must not keep the jobs of others waiting
                self._raise_if_database(error)
                log.exception("an engine cannot be looked after", extra=fields(engine=engine.id))
        pause = TEND_SECONDS if self._places.objects is None else TEND_OBJECTS_SECONDS
        self._next = time.monotonic() + pause

    def look_at(self, engine_id: str) -> None:
        """Look at one engine now, since one of its jobs has ended: it may have ended too."""
        for engine in self._store.engines.live_engines(host=self._launcher.host):
            if engine.id == engine_id:
                self._tend(engine)

    def close(self, engine_id: str, *, if_idle: bool) -> bool:
        """Ask an engine to end; its jobs stop at a checkpoint and are queued again.

        False: it was asked before, or, with `if_idle`, it has a job.
        """
        closes = self._store.engines.close_engine(engine_id, if_idle=if_idle)
        if closes:
            log.info("an engine is asked to end", extra=fields(engine=engine_id))
            try:
                self._ask_to_end(self._directory(engine_id))
            except Exception as error:  # its place does not answer; `attend` asks again
                self._raise_if_database(error)
                log.exception("an engine could not be asked to end", extra=fields(engine=engine_id))
        return closes

    def run_of(self, job: Job) -> RunDir:
        """The run directory of a job that is about to start, where the ranks of its engine see
        it.
        """
        if self.options.mounts and job.engine_id is not None:
            return self._places.run_of_project(job.project_id, job.id)
        return self._places.run(job.id)

    def prepare(self, job: Job, spec: JobSpec) -> Path | None:
        """Write the documents of the engine in which a job has a seat, unless it has ended, and
        return the engine's directory. None: the job has no seat.
        """
        if job.engine_id is None:
            return None
        slots = self._store.engines.engine_slots(job.engine_id)
        engine = self._directory(job.engine_id)
        if slots:
            given = self._store.engines.limits(job.engine_id)
            held = EngineSpec(
                engine_id=job.engine_id,
                project_id=job.project_id,
                spec=spec,
                most_seats=given.most_seats,
                room=given.room,
                idle_seconds=self.options.idle_seconds,
            )
            engine.prepare(
                held, slots if self._launcher.slots_name_gpus else [], job.slots, job.priority
            )
        return engine.run.root

    def _tend(self, engine: EngineRecord) -> None:
        directory = self._directory(engine.id)
        seen = self._launcher.observe(directory.attempt)
        joules = directory.attempt.joules(nodes=1)
        if joules is not None and joules > (engine.joules or 0.0):
            self._store.engines.measured(engine.id, joules)
        if isinstance(seen, Ended):
            directory.hide()
            # first: once its row says that it has ended, nobody looks after it.
            self._launcher.clean(directory.attempt)
            if self._store.engines.end_engine(engine.id):
                why = seen.exit.message if seen.exit else "its processes vanished"
                log.info("an engine has ended: %s", why, extra=fields(engine=engine.id))
        elif isinstance(seen, Absent) and not engine.seats:
            # So that it cannot start any more.
            self._launcher.kill(directory.attempt, Reason.USER_CANCELLED)
        elif isinstance(seen, Running) and engine.closing_at is not None:
            self._ask_to_end(directory, again=not seen.admitted)
        elif isinstance(seen, Running) and directory.run.has(directory.attempt.keys.stop):
            # Its host takes the place back: its jobs must not join it again.
            self.close(engine.id, if_idle=False)
        elif (
            isinstance(seen, Running)
            and not engine.seats
            and (not seen.admitted or self._overstays(engine))
        ):
            self.close(engine.id, if_idle=True)

    def _overstays(self, engine: EngineRecord) -> bool:
        """Whether an engine without jobs should have ended by itself long ago."""
        return self._store.now() - engine.divided_at > 2 * self.options.idle_seconds + IDLE_SECONDS

    def _ask_to_end(self, engine: EngineDirectory, *, again: bool = False) -> None:
        """`again`: also if it was asked before: its ranks do not run yet, so that only its place
        can have heard of it.
        """
        if engine.attempt.has_start() and (
            again or not engine.run.has(engine.attempt.keys.control)
        ):
            self._launcher.signal(engine.attempt, Control(generation=2, desired=Desired.PAUSE))

    def _raise_if_database(self, error: Exception) -> None:
        """Raise what may be the database's error. With FT_STORAGE it may be the storage's, and then
        the next request shows whether the database answers.
        """
        if isinstance(error, UnavailableError) and self._places.objects is None:
            raise error

    def _directory(self, engine_id: str) -> EngineDirectory:
        return EngineDirectory(self._places, engine_id)
