from __future__ import annotations

from dataclasses import replace

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import JobChange
from tests.support.creating import create_job
from tests.support.records import PROJECT, claim, new_file, new_job, place


def test_statistics_count_jobs_slots_and_bytes_of_all_projects(store):
    empty = store.statistics()
    assert (empty.jobs, empty.slots_in_use, empty.file_bytes) == ({}, {}, 0)
    assert empty.oldest_queued_seconds == empty.overdue_seconds == 0.0
    store.projects.ensure_project("other", "rival")
    running = place(store, create_job(store, new_job(state=State.QUEUED, slots=2)), [0, 1])
    create_job(
        store,
        new_job(
            project_id="other", state=State.FAILED, reason=Reason.INVALID_FILE, finished_at=1.0
        ),
    )
    create_job(store, new_job(state=State.VALIDATING))
    claimed = claim(store)
    assert claimed.job.state is State.VALIDATING or claimed.job.id == running.id
    while claimed.job.state is not State.VALIDATING:
        claimed = claim(store)
    store.leases.apply(claimed, JobChange(job=replace(claimed.job, state=State.QUEUED)))
    store.files.add_file(new_file(bytes=7))
    found = store.statistics()
    assert found.jobs == {("running", ""): 1, ("failed", "invalid_file"): 1, ("queued", ""): 1}
    assert found.slots_in_use == {"h1": 2}
    assert found.file_bytes == 7
    queued = store.jobs.get_job(PROJECT, claimed.job.id)
    assert queued.queued_at is not None
    assert 0 <= found.oldest_queued_seconds < 60
    of_default, of_other = found.projects[PROJECT], found.projects.get("other")
    assert (of_default.jobs, of_default.slots) == ({"running": 1, "queued": 1}, 2)
    assert 0 <= of_default.oldest_queued_seconds < 60
    assert of_other is None, "what is over is counted by its reason alone"
