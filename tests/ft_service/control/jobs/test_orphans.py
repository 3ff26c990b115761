from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.control.jobs.orphans import find_orphans
from ft_service.jobs.decisions import placed
from ft_service.jobs.states import State
from ft_service.launcher.protocol import LaunchError, ListedAttempt, ListsAttempts
from ft_service.meters import Meters
from ft_service.store.records import JobChange, NewEngine
from tests.support.creating import create_job
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import add_job, new_reconciler, new_store
from tests.support.records import new_job


class ListingLauncher(FakeLauncher):
    """A place that lists what runs there, or cannot be asked."""

    def __init__(self, *job_ids: str) -> None:
        super().__init__()
        self.running = [
            ListedAttempt(f"ft-{job_id}-1", job_id, "2026-01-01T00:00:00Z") for job_id in job_ids
        ]
        self.is_away = False

    def unfinished(self) -> list[ListedAttempt]:
        if self.is_away:
            raise LaunchError("the cluster cannot be asked")
        return self.running

    def end_unfinished(self, name: str) -> None:
        self.running = [attempt for attempt in self.running if attempt.name != name]

    def close(self) -> None:
        pass


def test_what_the_database_does_not_know_is_orphaned(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    add_job(store, "ftjob-1")
    launcher = ListingLauncher("ftjob-1", "ftjob-of-another-database")
    assert [orphan.job_id for orphan in find_orphans(store, launcher)] == [
        "ftjob-of-another-database"
    ]
    assert not isinstance(FakeLauncher(), ListsAttempts), "a place that cannot list is not asked"


def test_an_engine_is_known_until_it_has_ended(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    job = create_job(
        store,
        new_job(id="ftjob-1", project_id="proj", state=State.QUEUED, slots=2, share_key="key"),
    )
    claim = store.leases.claim_queued(
        job.id, host="fake", owner="t", lease_seconds=60, host_slots=2
    )
    assert claim is not None
    placed_job = placed(claim.job, "fake", engine_id="engine-1")
    assert store.leases.apply(
        claim, JobChange(job=placed_job, take_slots=[0, 1], new_engine=NewEngine(8))
    )
    launcher = ListingLauncher("ftjob-1", "engine-1", "engine-2")
    assert [orphan.job_id for orphan in find_orphans(store, launcher)] == ["engine-2"]
    store.engines.end_engine("engine-1")
    assert [orphan.job_id for orphan in find_orphans(store, launcher)] == ["engine-1", "engine-2"]


@pytest.mark.parametrize("is_away", [False, True])
def test_the_reconciler_counts_them(tmp_path: Path, is_away: bool) -> None:
    store = new_store(tmp_path)
    meters = Meters()
    launcher = ListingLauncher("ftjob-a", "ftjob-b")
    launcher.is_away = is_away
    reconciler = new_reconciler(tmp_path, store, launcher, meters=meters)
    reconciler.step()
    reconciler.close()
    counted = meters.registry.get_sample_value("ft_orphaned_jobs")
    assert counted == 2 if not is_away else counted != counted, "NaN if the cluster did not answer"
