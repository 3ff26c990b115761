from __future__ import annotations

from dataclasses import replace

import pytest
from alembic.script import ScriptDirectory

from ft_service.errors import UnavailableError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.store.records import JobChange
from ft_service.store.sql import alembic_config
from tests.support.creating import create_job
from tests.support.engine_seats import sql
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


def test_statistics_tell_how_long_jobs_wait_and_were_not_looked_at(store):
    store.projects.ensure_project("other", "rival")
    for project, ago in ((PROJECT, 100), (PROJECT, 300), ("other", 200)):
        job = create_job(store, new_job(project_id=project, state=State.QUEUED))
        now = store.now()
        sql(
            store,
            "UPDATE jobs SET queued_at = :at, looked_at = :looked WHERE id = :id",
            at=now - ago,
            looked=now - ago / 10,
            id=job.id,
        )
    running = create_job(store, new_job(state=State.RUNNING, phase=Phase.TRAINING))
    sql(store, "UPDATE jobs SET looked_at = :at WHERE id = :id", at=store.now() - 50, id=running.id)
    found = store.statistics()
    assert found.oldest_queued_seconds == pytest.approx(300, abs=20)
    assert found.overdue_seconds == pytest.approx(50, abs=20)
    ages = {name: one.oldest_queued_seconds for name, one in found.projects.items()}
    assert ages == {
        PROJECT: pytest.approx(300, abs=20),
        "other": pytest.approx(200, abs=20),
    }
    assert found.projects["other"].jobs == {"queued": 1}
    assert found.projects["other"].slots == 0


def test_a_schema_older_than_this_version_s_is_refused_and_a_newer_one_is_not(store):
    store.check()
    scripts = ScriptDirectory.from_config(alembic_config())
    (oldest,), newest = scripts.get_bases(), scripts.get_current_head()
    try:
        for revision, refused in (("0999_of_a_later_release", False), (oldest, True)):
            sql(store, "UPDATE alembic_version SET version_num = :own", own=revision)
            if not refused:
                store.check()
                continue
            with pytest.raises(UnavailableError):
                store.check()
    finally:
        sql(store, "UPDATE alembic_version SET version_num = :own", own=newest)
    store.check()
