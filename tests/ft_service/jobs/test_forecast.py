from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ft_service.jobs.forecast import forecast
from ft_service.jobs.queue import QueueState
from ft_service.jobs.queue_snapshot import (
    QueueSnapshot,
    Share,
)
from tests.support.queue_snapshots import NOW, job, running_job, snapshot, snapshots

unhurried = settings(deadline=None, database=None, max_examples=60)


@unhurried
@given(snapshots())
def test_the_forecast_keeps_to_slots_and_limits_and_forgets_nobody(snapshot: QueueSnapshot) -> None:
    found = forecast(snapshot)
    assert sorted(found) == sorted(waiting.id for waiting in snapshot.waiting)
    assert sorted(one.position for one in found.values()) == list(range(1, len(found) + 1))
    state = QueueState(snapshot)
    for waiting in snapshot.waiting:
        limit = snapshot.shares[waiting.project].max_slots
        possible = state.hosts_for(waiting) and (limit is None or waiting.slots <= limit)
        behind = [
            w
            for w in snapshot.waiting
            if w.project == waiting.project
            and (-w.priority, w.number) < (-waiting.priority, waiting.number)
        ]
        if possible and all(limit is None or w.slots <= limit for w in behind):
            assert found[waiting.id].starts_at is not None, "everything it waits for ends"
    spans = [(h.host, h.project, h.slots, NOW, h.ends_at) for h in snapshot.running]
    for waiting in snapshot.waiting:
        if len(snapshot.hosts) == 1 and (at := found[waiting.id].starts_at) is not None:
            assert waiting.seconds is not None
            spans.append(("h0", waiting.project, waiting.slots, at, at + waiting.seconds))
    for _, _, _, moment, _ in spans:
        there = [span for span in spans if span[3] <= moment < (span[4] or math.inf)]
        for name, host in snapshot.hosts.items():
            assert sum(span[2] for span in there if span[0] == name) <= host.slots
        for name, share in snapshot.shares.items():
            assert (
                share.max_slots is None
                or sum(span[2] for span in there if span[1] == name) <= share.max_slots
            )


def test_reasons_say_who_is_before_a_job() -> None:
    waiting = (
        job("head", 0, slots=3, priority=2),
        job("own", 1),
        job("other", 2, project="b"),
        job("last", 3),
        job("back-off", 4, not_before=NOW + 20.0),
        job("noted", 5, note="The job cannot be observed now."),
        job("large", 6, slots=9),
    )
    found = forecast(snapshot(*waiting, running=(running_job("r", 3),), a=Share(used=5000.0)))
    reasons = {name: one.reason for name, one in found.items()}
    assert reasons["head"] == "It is next. It needs 3 slots, and 1 is free."
    assert reasons["last"].endswith("of this project.") or "of this project" in reasons["last"]
    assert "1 of higher priority" in reasons["last"]
    assert reasons["back-off"] == "The next attempt is made in 20 s."
    assert reasons["noted"] == "The job cannot be observed now."
    assert reasons["large"] == "It needs 9 slots on one host, and no host has so many now."
    assert forecast(replace(snapshot(job("x")), hosts={}))["x"].reason.startswith(
        "No process moves jobs now"
    )
    assert found["head"].starts_at == NOW + 100.0


def test_an_unknown_end_gives_no_estimate_and_long_queues_are_estimated_by_their_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = (running_job("r", 4, ends_in=None),)
    assert forecast(snapshot(job("x"), running=busy))["x"].starts_at is None
    waiting = [job(f"w{n}", n) for n in range(40)]
    played = forecast(snapshot(*waiting))
    monkeypatch.setattr("ft_service.jobs.forecast.SIMULATED", 8)
    guessed = forecast(snapshot(*waiting))
    for one in waiting:
        exact = played[one.id].starts_at
        guess = guessed[one.id].starts_at
        assert exact is not None
        assert guess is not None
        assert abs(exact - guess) <= 100.0
