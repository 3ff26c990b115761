"""A service that was restored on another machine, or whose container was replaced, goes on with its
jobs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from ft_service.control.jobs.former_hosts import take_over
from ft_service.host.lifetime import RANKS_LOCK, try_lock
from ft_service.jobs.states import Job, State
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.attempt import Attempt
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.creating import create_job
from tests.support.reconciling import new_store
from tests.support.records import PROJECT, claim, new_job, place


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    store.projects.ensure_project(PROJECT, "acme")
    yield store
    store.close()


def left_by(host: str, store: Store, home: Path) -> tuple[Job, Job]:
    """A running job, with its run directory in FT_HOME, and a paused one of a host not announced
    for two minutes.
    """
    store.queue.announce_host(host, 4)
    running, paused = (create_job(store, new_job(state=State.QUEUED, slots=1)) for _ in range(2))
    place(store, running, [0], host=host)
    Places(home).run(running.id).root.mkdir(parents=True)
    with store.writing() as connection:
        leave = text(
            "UPDATE jobs SET state = 'paused', desired = 'pause', host = :host WHERE id = :id"
        )
        connection.execute(leave, {"host": host, "id": paused.id})
        connection.execute(text("UPDATE hosts SET seen_at = seen_at - 120"))
    return running, paused


def test_jobs_of_a_machine_that_is_gone_go_on_here(store: Store, tmp_path: Path) -> None:
    running, paused = left_by("old", store, tmp_path)
    assert store.jobs.get_job(PROJECT, running.id).host == "old"
    take_over(store, Places(tmp_path), "new")
    assert claim(store, host="new").job.id == running.id
    resumed = store.jobs.request(PROJECT, paused.id, Verb.RESUME)
    assert (resumed.state, resumed.host) == (State.QUEUED, "new")
    assert store.leases.free_slots("old", 1) == [0]


@pytest.mark.parametrize("lock", ["supervisor", "rank"])
def test_a_machine_whose_processes_live_keeps_its_jobs(
    store: Store, tmp_path: Path, lock: str
) -> None:
    """Its server is stopped for a while; training does not need it."""
    running, _ = left_by("old", store, tmp_path)
    run = Places(tmp_path).run(running.id)
    descriptor = try_lock(
        Attempt(run, 1).node().lock if lock == "supervisor" else run.path(RANKS_LOCK)
    )
    assert descriptor is not None
    take_over(store, Places(tmp_path), "new")
    assert store.jobs.get_job(PROJECT, running.id).host == "old"
    os.close(descriptor)
    take_over(store, Places(tmp_path), "new")
    assert store.jobs.get_job(PROJECT, running.id).host == "new"


def test_a_machine_with_another_home_keeps_its_jobs(store: Store, tmp_path: Path) -> None:
    """Its jobs could not go on here, whether or not it has ended."""
    running, _ = left_by("old", store, tmp_path / "other")
    take_over(store, Places(tmp_path), "new")
    assert store.jobs.get_job(PROJECT, running.id).host == "old"


@pytest.mark.parametrize("host", ["slurm", "kubernetes/ft"])
def test_jobs_in_a_cluster_stay_there(store: Store, tmp_path: Path, host: str) -> None:
    running, _ = left_by(host, store, tmp_path)
    take_over(store, Places(tmp_path), "new")
    assert store.jobs.get_job(PROJECT, running.id).host == host


def test_a_machine_that_is_announced_keeps_its_jobs(store: Store, tmp_path: Path) -> None:
    running, _ = left_by("old", store, tmp_path)
    store.queue.announce_host("old", 4)
    take_over(store, Places(tmp_path), "new")
    assert store.jobs.get_job(PROJECT, running.id).host == "old"


def test_a_request_that_has_read_a_job_before_it_moved_is_not_lost(
    store: Store, tmp_path: Path
) -> None:
    """It writes the whole row, and would give the job back to the host that is gone."""
    _, paused = left_by("old", store, tmp_path)
    before = store.jobs.get_job(PROJECT, paused.id)
    take_over(store, Places(tmp_path), "new")
    assert store.jobs.get_job(PROJECT, paused.id).version == before.version + 1
