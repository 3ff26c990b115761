"""Where waiting jobs stand in the queue, for those who ask; played through at most once a second for all of them."""

from __future__ import annotations

import threading
import time

from ft_service.jobs.estimates import Paces
from ft_service.jobs.forecast import Forecast, Place, forecast
from ft_service.jobs.line import Line
from ft_service.jobs.states import Job
from ft_service.store.sql import Store

REMEMBERED_SECONDS = 1.0
"""How old a forecast may be."""
_MOST_OF_THE_TIME = 4
"""A forecast that took long is kept for so many times as long: no more than a quarter of a processor goes into them."""


class Forecasts:
    """Forecasts of queued jobs. Safe to share between threads; one of them makes a forecast, and the others wait for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._paces = Paces()
        self._paces_until = 0.0
        self._line: Line | None = None
        self._found: dict[str, Forecast] = {}
        self._until = 0.0
        self._not_before = 0.0

    def find(self, job: Job) -> Place | None:
        """A queued job's place; None: it has just come, or has just left the queue."""
        with self._lock:
            line = self._newest(job)
            known = self._found.get(job.id)
            return Place(known, line.share_of(job.project_id)) if known else None

    def share_of(self, project_id: str) -> float:
        """A project's part of what all projects have used lately, from 0 to 1."""
        with self._lock:
            return self._newest(None).share_of(project_id)

    def _newest(self, job: Job | None) -> Line:
        """The line, as new as `job` needs it: one that is not in it may have come since."""
        moment = time.monotonic()
        missing = job is not None and job.id not in self._found
        if self._line is None or moment >= self._until or (missing and moment >= self._not_before):
            self._line = self._play(moment)
        return self._line

    def _play(self, began: float) -> Line:
        if began >= self._paces_until:
            self._paces = Paces(self._store.measured_jobs())
            self._paces_until = began + self._paces.good_seconds
        line = self._store.whole_line(self._paces)
        self._found = forecast(line)
        took = time.monotonic() - began
        self._not_before = began + _MOST_OF_THE_TIME * took
        self._until = max(self._not_before, began + REMEMBERED_SECONDS)
        return line
