"""A cache of jobs' curves.

Every viewer of a job asks for them every few seconds, and little changes between two requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ft_service.jobs.curves import Curves, Kind
from ft_service.jobs.states import TERMINAL, Job
from ft_service.jobs.user_actions import Verb
from ft_service.store.jobs import ASKED
from ft_service.store.records import Reported
from ft_service.store.sql import Store

Derived = TypeVar("Derived")

_MOST_JOBS = 128
"""Jobs in the cache: half a megabyte for one of 10,000 steps."""
_MOST_DERIVED = 4
"""Derived values kept for a job: a page asks for its curves, and a list for its sparkline."""
_KINDS: dict[str, Kind] = {
    ASKED[Verb.PAUSE]: "pause",
    ASKED[Verb.RESUME]: "resume",
    ASKED[Verb.CANCEL]: "cancel",
}


@dataclass
class _CachedJob:
    lock: threading.Lock = field(default_factory=threading.Lock)
    curves: Curves = field(default_factory=Curves)
    position: int = 0
    """Place of the last event that was read."""
    is_complete: bool = False
    """Every event was read, and no more will come."""
    derived: dict[Hashable, tuple[Hashable, Any]] = field(default_factory=dict)
    """Key → version and value."""

    def add(self, event: Reported) -> None:
        self.position = event.position
        if event.metrics is not None:
            self.curves.add(event.attempt or 0, event.created_at, event.metrics)
        elif kind := _KINDS.get(event.message):
            self.curves.note(kind, event.created_at)


class CurveCache:
    """Curves that are extended by the new events alone. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: OrderedDict[str, _CachedJob] = OrderedDict()
        self._lock = threading.Lock()

    def derived(
        self, job: Job, key: Hashable, version: Hashable, derive: Callable[[Curves], Derived]
    ) -> tuple[Derived, int]:
        """Return what `derive` makes of a job's curves, and the place of the newest event in them.

        The value is kept under `key` until the curves or `version` change. The caller checks that
        it may see the job.
        """
        is_over = job.state in TERMINAL and job.phase is None
        with self._lock:
            cached = self._jobs.setdefault(job.id, _CachedJob())
            self._jobs.move_to_end(job.id)
            if len(self._jobs) > _MOST_JOBS:
                self._jobs.popitem(last=False)
        with cached.lock:
            if not cached.is_complete:
                for event in self._store.jobs.reported_since(job.id, cached.position):
                    cached.add(event)
                cached.is_complete = is_over  # the job was read before its events
            current = (cached.position, version)
            entry = cached.derived.get(key)
            if entry is None or entry[0] != current:
                if len(cached.derived) >= _MOST_DERIVED:
                    cached.derived.clear()
                entry = cached.derived[key] = current, derive(cached.curves)
            return entry[1], cached.position
