"""A reconciler's side of the queue: which waiting job it claims, where that starts, and who makes room for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ft_service.jobs import decisions
from ft_service.jobs.estimates import Paces
from ft_service.jobs.line import Line, Start
from ft_service.jobs.queue import displaced, next_start
from ft_service.jobs.slot_choice import choose_slots
from ft_service.jobs.states import Job
from ft_service.launcher.base import Launcher
from ft_service.store.queue import HOST_SECONDS
from ft_service.store.records import Claim
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

TELL_SECONDS = 5.0
"""How often jobs are looked for that this place can never start."""
DISPLACE_SECONDS = 1.0
"""How often jobs are looked for that must make room."""


@dataclass(frozen=True)
class Placed:
    """A job with a new attempt, and the slots that this takes."""

    job: Job
    slots: Mapping[str, list[int]]
    """Host → slot numbers."""

    @property
    def told(self) -> str:
        """For the job's user. That training starts is for the ranks to say."""
        count = f"{self.job.slots} slot{'s' if self.job.slots > 1 else ''}"
        named = [] if list(self.slots) == [self.job.host] else list(self.slots)
        return f"Attempt {self.job.attempt} is placed on {count}{f' of {self._listed(named)}' if named else ''}."

    @staticmethod
    def _listed(hosts: list[str]) -> str:
        return " and ".join(filter(None, [", ".join(hosts[:-1]), hosts[-1]]))


class Placing:
    """Claims waiting jobs for one place. For one thread."""

    def __init__(
        self, store: Store, launcher: Launcher, *, owner: str, lease_seconds: float, displace_after: float | None
    ) -> None:
        """`displace_after`: as the Reconciler's."""
        self._store, self._launcher = store, launcher
        self._owner, self._lease_seconds = owner, lease_seconds
        self._displace_after = displace_after
        self._displace_at = self._tell_at = self._host_at = self._paces_at = 0.0
        self._paces = Paces()
        self._chosen: Start | None = None

    def claim(self) -> Claim | None:
        """The job whose turn it is, if it may start now; or one that must be told that it never can here."""
        place, hosts = self._launcher.host, self._launcher.hosts
        totals = {name: host.slots for name, host in hosts.items()}
        total = sum(totals.values())
        who = {"host": place, "owner": self._owner, "lease_seconds": self._lease_seconds, "host_slots": total}
        if time.monotonic() >= self._tell_at:
            if list(hosts) == [place] and (claim := self._store.claim_too_large(**who)):
                return claim
            self._tell_at = time.monotonic() + TELL_SECONDS
        self._tell_host(place, totals)
        may_displace = self._displace_after is not None and time.monotonic() >= self._displace_at
        if not may_displace and not any(self._store.free_slots_of(totals).values()):
            return None
        self._measure()
        line = self._store.line_for(place, hosts, self._paces)
        self._chosen = next_start(line)
        if self._chosen is None:
            if may_displace:
                self._make_room(line)
            return None
        return self._store.claim_queued(self._chosen.job.id, **who)

    def place(self, job: Job, now: float) -> Placed | None:
        """A job that was claimed, on the slots that were free a moment ago. None: they are not any more."""
        start, hosts = self._chosen, self._launcher.hosts
        if start is None or start.job.id != job.id or any(host not in hosts for host in start.hosts):
            return None
        free = self._store.free_slots_of({host: hosts[host].slots for host in start.hosts})
        slots = {host: choose_slots(start.on_each, free[host]) for host in sorted(start.hosts)}
        taken = {host: numbers for host, numbers in slots.items() if numbers is not None}
        if len(taken) < len(start.hosts):
            return None
        ends_at = None if start.seconds is None else now + start.seconds
        return Placed(replace(decisions.placed(job, self._launcher.host, start.shape), ends_at=ends_at), taken)

    def _make_room(self, line: Line) -> None:
        """Ask jobs to stop that the head of the queue may displace."""
        assert self._displace_after is not None, "nobody may be displaced"
        self._displace_at = time.monotonic() + DISPLACE_SECONDS
        head, holdings = displaced(line, after_seconds=self._displace_after) or (None, [])
        for holding in holdings:
            if head and self._store.displace(head, holding.id):
                log.info("job makes room for %s", head.id, extra={"job_id": holding.id})

    def _tell_host(self, place: str, totals: Mapping[str, int]) -> None:
        """Now and then: say that the place is there, unless agents do."""
        if time.monotonic() >= self._host_at:
            self._host_at = time.monotonic() + HOST_SECONDS / 6
            if list(totals) == [place]:
                self._store.tell_host(place, totals[place])

    def _measure(self) -> None:
        """Now and then: look at how long jobs take."""
        if time.monotonic() >= self._paces_at:
            self._paces = Paces(self._store.measured_jobs())
            self._paces_at = time.monotonic() + self._paces.good_seconds
