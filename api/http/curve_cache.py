"""Curves of jobs, remembered: whoever watches one asks every few seconds for what has hardly changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from ft_service.jobs.curves import Curves, Kind
from ft_service.jobs.states import TERMINAL, Job
from ft_service.jobs.verbs import Verb
from ft_service.store.jobs import ASKED
from ft_service.store.records import Reported
from ft_service.store.sql import Store

Taken = TypeVar("Taken")

_MOST = 128
"""Jobs whose curves are remembered at once: half a megabyte for one of 10,000 steps."""
_KINDS: dict[str, Kind] = {ASKED[Verb.PAUSE]: "pause", ASKED[Verb.RESUME]: "resume", ASKED[Verb.CANCEL]: "cancel"}


class CurveCache:
    """Reads of a job's events only those that are new. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, job: Job, take: Callable[[Curves, int], Taken]) -> Taken:
        """What `take` makes of a job's curves as they are now, and of a number that changes with them. Whether the caller may
        see the job, it must know."""
        job_id, over = job.id, job.state in TERMINAL and job.phase is None
        with self._lock:
            known = self._known.setdefault(job_id, _Known())
            self._known.move_to_end(job_id)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        with known.lock:
            if not known.over:
                for event in self._store.reported_since(job_id, known.position):
                    known.add(event)
                known.over = over  # as it was before its events were read
            return take(known.curves, known.position)


class _Known:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.curves = Curves()
        self.position = 0
        self.over = False
        """Nothing will come any more."""

    def add(self, event: Reported) -> None:
        self.position = event.position
        if event.metrics is not None:
            self.curves.add(event.attempt or 0, event.created_at, event.metrics)
        elif kind := _KINDS.get(event.message):
            self.curves.note(kind, event.created_at)
