"""Sweeps on both databases: stored whole with their jobs, listed, stopped, finished once,
hidden.
"""

from __future__ import annotations

import pytest

from ft_service.errors import NotFoundError, SpecError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import NewJob, NewSweep
from ft_service.store.sql import Store
from tests.support.records import OTHER, PROJECT, new_job

SETTINGS = {"method": "grid", "options": ["lora.r"], "eta": 2, "rungs": [0.25]}


def add(store: Store, sweep_id: str, jobs: int = 2) -> list[str]:
    new = [
        NewJob(new_job(sweep_id=sweep_id, sweep_values={"lora.r": number}))
        for number in range(jobs)
    ]
    sweep = NewSweep(
        id=sweep_id,
        project_id=PROJECT,
        request={"sweep": {"lora.r": [0, 1]}, "suffix": "a\0b"},
        settings=SETTINGS,
    )
    return [job.id for job in store.sweeps.create_sweep(sweep, new)]


def test_a_sweeps_whole_life(store: Store) -> None:
    first, second = add(store, "ftsweep-1")
    add(store, "ftsweep-2", jobs=3)
    [newest, oldest] = store.sweeps.list_sweeps(PROJECT).data
    assert (newest.id, oldest.id) == ("ftsweep-2", "ftsweep-1")
    assert (oldest.settings, oldest.request["sweep"]) == (SETTINGS, {"lora.r": [0, 1]})
    assert store.sweeps.list_sweeps(PROJECT, after="ftsweep-2").data == [oldest]
    assert store.sweeps.list_sweeps(OTHER).data == []
    with pytest.raises(NotFoundError):
        store.sweeps.get_sweep(OTHER, "ftsweep-1")
    with pytest.raises(NotFoundError):
        store.sweeps.cancel_sweep(OTHER, "ftsweep-1")
    assert [sweep.id for sweep in store.sweeps.unfinished_sweeps()] == ["ftsweep-1", "ftsweep-2"]
    jobs = store.sweeps.jobs_of_sweeps(["ftsweep-1", "ftsweep-2"])
    assert [job.sweep_values for job in jobs["ftsweep-1"]] == [{"lora.r": 0}, {"lora.r": 1}]
    assert len(jobs["ftsweep-2"]) == 3

    assert store.sweeps.stop_by_sweep(first, "stopped by the sweep: a test")
    assert not store.sweeps.stop_by_sweep(first, "stopped by the sweep: again")
    stopped = store.jobs.get_job(PROJECT, first)
    assert (stopped.state, stopped.reason, stopped.stopped) == (
        State.CANCELLED,
        Reason.SWEEP_STOPPED,
        "stopped by the sweep: a test",
    )
    assert store.jobs.list_events(PROJECT, first).data[0].message == "Stopped by the sweep: a test."
    with pytest.raises(SpecError, match="1 of its 2 jobs are not"):
        store.sweeps.delete_sweep(PROJECT, "ftsweep-1", keep_best=False)
    assert store.sweeps.cancel_sweep(PROJECT, "ftsweep-1").cancelled_at is not None
    assert store.jobs.get_job(PROJECT, second).reason is Reason.USER_CANCELLED
    assert store.jobs.get_job(PROJECT, first).reason is Reason.SWEEP_STOPPED, (
        "what is over stays what it is"
    )
    best = store.jobs.get_job(PROJECT, second)
    assert store.sweeps.finish_sweep(oldest, best, "Best of the 2 jobs")
    assert not store.sweeps.finish_sweep(oldest, best, "Best of the 2 jobs")
    assert store.sweeps.get_sweep(PROJECT, "ftsweep-1").best_job == second
    assert [event.message for event in store.jobs.list_events(PROJECT, second).data].count(
        "Best of the 2 jobs"
    ) == 1
    store.sweeps.delete_sweep(PROJECT, "ftsweep-1", keep_best=False)
    assert [sweep.id for sweep in store.sweeps.list_sweeps(PROJECT).data] == ["ftsweep-2"]
    with pytest.raises(NotFoundError):
        store.sweeps.get_sweep(PROJECT, "ftsweep-1")
