"""Curves of a job are extended by new events, and what is derived from them is kept until they
change.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from api.http.curve_cache import CurveCache
from ft_service.jobs.states import Job, State
from ft_service.store.records import Reported


def event(position: int, loss: float) -> Reported:
    return Reported(
        position, 1, float(position), "", {"step": position, "total_steps": 9, "train_loss": loss}
    )


def test_only_new_events_are_read_and_a_finished_job_is_read_no_more() -> None:
    events = [event(1, 3.0)]
    asked = list[int]()

    def reported_since(job_id: str, position: int) -> list[Reported]:
        asked.append(position)
        return [one for one in events if one.position > position]

    cache = CurveCache(
        cast(Any, SimpleNamespace(jobs=SimpleNamespace(reported_since=reported_since)))
    )
    job = cast(Any, SimpleNamespace(id="ftjob-1", state=State.RUNNING, phase=None))
    derived = list[int]()

    def losses(job: Job, version: object = None) -> tuple[list[float], int]:
        def derive(curves: Any) -> list[float]:
            derived.append(curves.step)
            return curves.series("train_loss", 10).values

        return cache.derived(job, "losses", version, derive)

    assert losses(job) == ([3.0], 1)
    assert losses(job) == ([3.0], 1)
    assert derived == [1], "kept"
    assert losses(job, "checkpoint") == ([3.0], 1)
    assert derived == [1, 1], "the version has changed"
    events.append(event(2, 2.0))
    over = SimpleNamespace(id="ftjob-1", state=State.SUCCEEDED, phase=None)
    assert losses(cast(Any, over)) == ([3.0, 2.0], 2)
    events.append(event(3, 1.0))
    assert losses(cast(Any, over)) == ([3.0, 2.0], 2)
    assert asked == [0, 1, 1, 1]
