"""Curves of jobs, remembered: whoever watches one asks every few seconds for what has hardly changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ft_service.jobs.curves import Curves, Kind
from ft_service.jobs.states import TERMINAL, Job
from ft_service.jobs.verbs import Verb
from ft_service.store.jobs import ASKED
from ft_service.store.records import Reported
from ft_service.store.sql import Store

Made = TypeVar("Made")

_MOST = 128
"""Jobs whose curves are remembered at once: half a megabyte for one of 10,000 steps."""
_MOST_MADE = 4
"""Of one job: a page asks for its curves, and a list for its sparkline."""
_KINDS: dict[str, Kind] = {ASKED[Verb.PAUSE]: "pause", ASKED[Verb.RESUME]: "resume", ASKED[Verb.CANCEL]: "cancel"}


class CurveCache:
    """Reads of a job's events only those that are new. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, job: Job, what: Hashable, state: Hashable, make: Callable[[Curves], Made]) -> tuple[Made, int]:
        """What `make` makes of a job's curves as they are now, and a number that changes with them. It is made anew if they
        have changed, or `state` has, since this was asked for `what`. Whether the caller may see the job, it must know."""
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
            return known.made_once(what, state, make), known.position


class _Known:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.curves = Curves()
        self.position = 0
        self._made: dict[Hashable, tuple[Hashable, Any]] = {}
        self.over = False
        """Nothing will come any more."""

    def add(self, event: Reported) -> None:
        self.position = event.position
        if event.metrics is not None:
            self.curves.add(event.attempt or 0, event.created_at, event.metrics)
        elif kind := _KINDS.get(event.message):
            self.curves.note(kind, event.created_at)

    def made_once(self, what: Hashable, state: Hashable, make: Callable[[Curves], Any]) -> Any:
        now = (self.position, state)
        made = self._made.get(what)
        if made is None or made[0] != now:
            if len(self._made) >= _MOST_MADE:
                self._made.clear()
            made = self._made[what] = now, make(self.curves)
        return made[1]
