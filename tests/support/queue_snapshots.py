"""Queues for tests: any that hypothesis draws, and small ones by hand."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from ft_service.jobs.queue_snapshot import (
    Host,
    QueuedJob,
    QueueSnapshot,
    RunningJob,
    Share,
)

NOW = 1_000_000.0
NAMES = ("a", "b", "c")

times = st.sampled_from([10.0, 60.0, 600.0, 7200.0])


@st.composite
def snapshots(draw: st.DrawFn, known: bool = True) -> QueueSnapshot:
    """Any moment of a queue. `known`: how long everything takes is."""
    hosts = {f"h{n}": Host(slots=draw(st.integers(1, 6))) for n in range(draw(st.integers(1, 2)))}
    seconds = times if known else st.none() | times
    waiting = [
        QueuedJob(
            id=f"w{n}",
            project=draw(st.sampled_from(NAMES)),
            number=n,
            slots=draw(st.integers(1, 4)),
            priority=draw(st.sampled_from([0, 0, 0, 1, 5])),
            seconds=draw(seconds),
            not_before=draw(st.sampled_from([0.0, 0.0, 0.0, NOW + 30.0])),
            host=draw(st.sampled_from([None, None, None, "h0"])),
        )
        for n in range(draw(st.integers(0, 12)))
    ]
    limits = st.none() | st.integers(1, 6)
    shares = {
        name: Share(used=draw(st.sampled_from([0.0, 100.0, 5000.0])), max_slots=draw(limits))
        for name in NAMES
    }
    running = list[RunningJob]()
    ranks = Counter[str]()
    for n, host in enumerate(draw(st.lists(st.sampled_from(sorted(hosts)), max_size=6))):
        project = draw(st.sampled_from(NAMES))
        slots = draw(st.integers(1, 3))
        held = sum(job.slots for job in running if job.host == host)
        ranks[project] += slots
        if held + slots <= hosts[host].slots and ranks[project] <= (
            shares[project].max_slots or 99
        ):
            left = draw(seconds)
            since = draw(st.sampled_from([0.0, 300.0, 3000.0]))
            running.append(
                RunningJob(
                    id=f"r{n}",
                    project=project,
                    host=host,
                    slots=slots,
                    priority=draw(st.sampled_from([0, 0, 1])),
                    ends_at=None if left is None else NOW + left,
                    taken_at=NOW - since,
                    preemptible=draw(st.booleans()),
                )
            )
    return QueueSnapshot(now=NOW, hosts=hosts, waiting=waiting, running=running, shares=shares)


def job(name: str, number: int = 0, **values: object) -> QueuedJob:
    defaults = {"id": name, "project": "a", "number": number, "slots": 1, "seconds": 100.0}
    return QueuedJob(**(defaults | values))  # type: ignore[arg-type]


def running_job(
    name: str, slots: int, ends_in: float | None = 100.0, **values: object
) -> RunningJob:
    ends_at = None if ends_in is None else NOW + ends_in
    defaults = {
        "id": name,
        "project": "z",
        "host": "h",
        "slots": slots,
        "ends_at": ends_at,
        "taken_at": 0.0,
    }
    return RunningJob(**(defaults | values))  # type: ignore[arg-type]


def snapshot(
    *waiting: QueuedJob, total: int = 4, running: tuple[RunningJob, ...] = (), **shares: Share
) -> QueueSnapshot:
    return QueueSnapshot(
        now=NOW, hosts={"h": Host(slots=total)}, waiting=waiting, running=running, shares=shares
    )
