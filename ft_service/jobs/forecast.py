"""What a waiting job's user is told: its place in the queue, why it waits, and when it is expected to start. Pure.

The queue is played forward: jobs start by the very rule that starts them (`ft_service.jobs.queue`), and end when they are
expected to. What is not known stays so: behind a job whose end nobody can tell, no start is estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ft_service.jobs.line import Line, Waiting, is_ahead
from ft_service.jobs.queue import Room

SIMULATED = 1000
"""Starts that are played through. Those after them are estimated by the slots that all before them need."""


@dataclass(frozen=True)
class Forecast:
    position: int
    """1: no other waiting job is expected to start before it."""
    reason: str
    """Why it does not run yet, in a sentence for its user."""
    starts_at: float | None
    """Expected, in seconds since the epoch; None: not known."""


@dataclass(frozen=True)
class Place:
    """A waiting job's place in the queue."""

    forecast: Forecast
    share: float
    """Its project's part of what all projects have used."""


def forecast(line: Line) -> dict[str, Forecast]:
    """The forecast of every waiting job, by its id."""
    expected = _played(line)
    reasons = _reasons(line, [job for job, _ in expected])
    return {
        job.id: Forecast(position, reason, starts_at)
        for position, ((job, starts_at), reason) in enumerate(zip(expected, reasons, strict=True), 1)
    }


def _played(line: Line) -> list[tuple[Waiting, float | None]]:
    """Waiting jobs in the order of their expected starts, and these."""
    room = Room(line)
    started: list[tuple[Waiting, float | None]] = []
    goes_on = True
    while goes_on and len(started) < SIMULATED:
        while len(started) < SIMULATED and (start := room.next_start()):
            room.start(start)
            started.append((start.job, room.now))
        goes_on = room.advance()
    left = [*room.in_order(), *room.later()]
    slots = sum(host.slots for host in line.hosts.values())
    if not goes_on or not slots or any(job.seconds is None for job in left):
        return [*started, *((job, None) for job in left)]
    at = room.now
    for job in left:
        earliest = max(at, job.not_before) if is_ahead(job.not_before, room.now) else at
        started.append((job, earliest if room.hosts_for(job) else None))
        at += job.slots * (job.seconds or 0.0) / slots
    return started


def _reasons(line: Line, order: Sequence[Waiting]) -> list[str]:
    """Why each job waits. `order`: of their expected starts."""
    room = Room(line)
    head, about_to = room.head(), room.next_start()
    higher: Counter[int] = Counter()
    same: Counter[tuple[int, str]] = Counter()
    reasons = []
    for job in order:
        if job.note:
            reasons.append(job.note)
        elif is_ahead(job.not_before, line.now):
            reasons.append(f"The next attempt is made in {job.not_before - line.now:.0f} s.")
        elif not line.hosts:
            reasons.append(
                "No process moves jobs now: `ft serve` or `ft reconcile` does, and on hosts of their own `ft agent`."
            )
        elif not room.hosts_for(job):
            reasons.append(_no_host(job, line))
        elif room.over_limit(job):
            limit = line.shares[job.project].max_slots
            reasons.append(
                f"Its project runs {_count(room.running[job.project], 'rank')} and may run {limit} at once; this job needs "
                f"{job.slots}."
            )
        elif about_to and about_to.job.id == job.id:
            reasons.append("It is about to start.")
        elif head and head.id == job.id:
            reasons.append(_next(job, room))
        else:
            reasons.append(_behind(job, higher, same))
        higher[job.priority] += 1
        same[job.priority, job.project] += 1
    return reasons


def _no_host(job: Waiting, line: Line) -> str:
    if job.host is not None and all(job.host not in (name, host.place) for name, host in line.hosts.items()):
        return f"Its host, {job.host}, does not answer now."
    if job.memory is not None and Room(line).hosts_for(replace(job, memory=None)):
        return f"Each of its ranks needs {job.memory / 2**30:.1f} GiB, and no host that answers now has so much for one."
    return f"It needs {_needs(job)}, and no host has so many now."


def _next(job: Waiting, room: Room) -> str:
    """What the head of the queue waits for."""
    each, number = room.spread(room.hosts_for(job)[0], job.smallest)
    most = sorted((max(0, room.free[host]) for host in room.hosts_for(job)), reverse=True)[:number]
    if number == 1:
        return f"It is next. It needs {_count(job.slots, 'slot')}, and {most[0]} {'is' if most[0] == 1 else 'are'} free."
    return f"It is next. It needs {each} on each of {number} hosts, and {', '.join(map(str, most))} are free."


def _needs(job: Waiting) -> str:
    if job.nodes == 1:
        return f"{_count(job.slots, 'slot')} on one host"
    return f"{_count(job.smallest.per_node, 'slot')} on each of {job.nodes} hosts of one kind"


def _behind(job: Waiting, before: Counter[int], same: Counter[tuple[int, str]]) -> str:
    """Who is before a job."""
    higher = sum(count for priority, count in before.items() if priority > job.priority)
    own = same[job.priority, job.project]
    others = before[job.priority] - own
    lower = sum(before.values()) - higher - own - others
    parts = [
        f"{higher} of higher priority" if higher else "",
        f"{own} of this project" if own else "",
        f"{others} of projects that have used less" if others else "",
        f"{lower} that fit before it" if lower else "",
    ]
    who = ", ".join(filter(None, parts))
    return f"{_count(higher + own + others + lower, 'job')} before it: {who}." if who else "It waits for free slots."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
