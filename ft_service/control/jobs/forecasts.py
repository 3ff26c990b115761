"""Cached forecasts of waiting jobs: the queue is simulated at most once a second for all
requests.
"""

from __future__ import annotations

import threading
import time

from ft_service.jobs.estimates import Paces
from ft_service.jobs.forecast import Forecast, QueuePosition, forecast
from ft_service.jobs.queue_snapshot import QueueSnapshot
from ft_service.jobs.states import Job
from ft_service.store.sql import Store

CACHE_SECONDS = 1.0
"""Age limit of a forecast."""
_CACHE_FACTOR = 4
"""A forecast is kept at least so many times as long as it took, so that forecasts take at most a
quarter of a processor.
"""


class Forecasts:
    """Forecasts of queued jobs.

    Safe to share between threads: one makes a forecast while the others wait for it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._paces = Paces()
        self._paces_until = 0.0
        self._snapshot: QueueSnapshot | None = None
        self._forecasts: dict[str, Forecast] = {}
        self._until = 0.0
        self._not_before = 0.0

    def find(self, job: Job) -> QueuePosition | None:
        """A queued job's place; None: it has just entered or left the queue."""
        with self._lock:
            snapshot = self._newest(job)
            known = self._forecasts.get(job.id)
            return QueuePosition(known, snapshot.share_of(job.project_id)) if known else None

    def share_of(self, project_id: str) -> float:
        """A project's part of what all projects have used lately, from 0 to 1."""
        with self._lock:
            return self._newest(None).share_of(project_id)

    def _newest(self, job: Job | None) -> QueueSnapshot:
        """A recent snapshot, renewed early if `job` is missing in it."""
        moment = time.monotonic()
        missing = job is not None and job.id not in self._forecasts
        if (
            self._snapshot is None
            or moment >= self._until
            or (missing and moment >= self._not_before)
        ):
            self._snapshot = self._simulate(moment)
        return self._snapshot

    def _simulate(self, began: float) -> QueueSnapshot:
        if began >= self._paces_until:
            self._paces = Paces(self._store.queue.measured_jobs())
            self._paces_until = began + self._paces.good_seconds
        snapshot = self._store.queue.snapshot(self._paces)
        self._forecasts = forecast(snapshot)
        took = time.monotonic() - began
        self._not_before = began + _CACHE_FACTOR * took
        self._until = max(self._not_before, began + CACHE_SECONDS)
        return snapshot
