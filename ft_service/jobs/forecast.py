"""A waiting job's place in the queue, why it waits, and its expected start. Pure.

The queue is simulated: jobs start by the rule that starts them in reality (`queue.py`), and end
when they are expected to. A job that needs slots of a job of unknown length has no expected start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.jobs.queue import QueueState
from ft_service.jobs.queue_snapshot import QueuedJob, QueueSnapshot, is_ahead
from ft_service.wording import counted

SIMULATED = 1000
"""Number of starts to simulate.

Later ones are estimated from the slots that all jobs before them need.
"""


@dataclass(frozen=True)
class Forecast:
    position: int
    """1: no other waiting job is expected to start earlier."""
    reason: str
    """Sentence for the user why the job does not run yet."""
    starts_at: float | None
    """Expected start in seconds since the epoch; None: unknown."""


@dataclass(frozen=True)
class QueuePosition:
    """A waiting job's forecast, and its project's share."""

    forecast: Forecast
    share: float
    """The project's part of what all projects have used."""


def forecast(snapshot: QueueSnapshot) -> dict[str, Forecast]:
    """Forecasts of all waiting jobs, by job id."""
    expected = _simulate(snapshot)
    reasons = _reasons(snapshot, [job for job, _ in expected])
    return {
        job.id: Forecast(position, reason, starts_at)
        for position, ((job, starts_at), reason) in enumerate(
            zip(expected, reasons, strict=True), 1
        )
    }


def _simulate(snapshot: QueueSnapshot) -> list[tuple[QueuedJob, float | None]]:
    """Waiting jobs with their expected starts, in that order."""
    state = QueueState(snapshot)
    started: list[tuple[QueuedJob, float | None]] = []
    more = True
    while more and len(started) < SIMULATED:
        while len(started) < SIMULATED and (start := state.next_start()):
            state.start(start)
            started.append((start.job, state.now))
        more = state.advance()
    left = [*state.in_order(), *state.later()]
    slots = sum(host.slots for host in snapshot.hosts.values())
    if not more or not slots or any(job.seconds is None for job in left):
        return [*started, *((job, None) for job in left)]
    at = state.now
    for job in left:
        earliest = max(at, job.not_before) if is_ahead(job.not_before, state.now) else at
        started.append((job, earliest if state.hosts_for(job) else None))
        at += job.slots * (job.seconds or 0.0) / slots
    return started


def _reasons(snapshot: QueueSnapshot, order: Sequence[QueuedJob]) -> list[str]:
    """Why each job waits. `order`: jobs in order of their expected starts."""
    state = QueueState(snapshot)
    head = state.head()
    about_to = state.next_start()
    higher: Counter[int] = Counter()
    same: Counter[tuple[int, str]] = Counter()
    reasons = []
    for job in order:
        if job.note:
            reasons.append(job.note)
        elif is_ahead(job.not_before, snapshot.now):
            reasons.append(f"The next attempt is made in {job.not_before - snapshot.now:.0f} s.")
        elif not snapshot.hosts:
            reasons.append("No process moves jobs now: `ft serve` or `ft reconcile` does.")
        elif not state.hosts_for(job):
            reasons.append(_no_host(job, snapshot))
        elif state.over_limit(job) and state.open_engine(job) is None:
            limit = snapshot.shares[job.project].max_slots
            reasons.append(
                f"Its project runs {counted(state.ranks[job.project], 'rank')} and may run "
                f"{limit} at once; this job needs "
                f"{job.slots}."
            )
        elif about_to and about_to.job.id == job.id:
            reasons.append("It is about to start.")
        elif head and head.id == job.id:
            reasons.append(_next(job, state))
        else:
            reasons.append(_behind(job, higher, same))
        higher[job.priority] += 1
        same[job.priority, job.project] += 1
    return reasons


def _no_host(job: QueuedJob, snapshot: QueueSnapshot) -> str:
    if job.host is not None and job.host not in snapshot.hosts:
        return f"Its host, {job.host}, does not answer now."
    return f"It needs {counted(job.slots, 'slot')} on one host, and no host has so many now."


def _next(job: QueuedJob, state: QueueState) -> str:
    """What the head of the queue waits for."""
    most = max(max(0, state.free[host]) for host in state.hosts_for(job))
    return (
        f"It is next. It needs {counted(job.slots, 'slot')}, and {most} "
        f"{'is' if most == 1 else 'are'} free."
    )


def _behind(job: QueuedJob, before: Counter[int], same: Counter[tuple[int, str]]) -> str:
    """The number and kind of jobs ahead of a job."""
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
    return (
        f"{counted(higher + own + others + lower, 'job')} before it: {who}."
        if who
        else "It waits for free slots."
    )
