"""Many jobs of three projects, in engines and alone, while their processes are killed and the
service starts again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.control.jobs.reconciler import Reconciler
from ft_service.host import processes
from ft_service.host.processes import ProcessIdentity
from ft_service.jobs import decisions
from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.spec import StoredSpec
from ft_service.store.sql import Store
from ft_service.store.tenants.usage import UsageQuery
from tests.support.attempts import wait_for
from tests.support.creating import create_job
from tests.support.engines import engine_launcher, engine_reconciler, sharing_spec
from tests.support.reconciling import PROJECT, new_store

PROJECTS = (PROJECT, "second", "third")
SLOTS = 8
JOBS = 200
KILLS = 60
TURNS_PER_KILL = 12


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store with three projects, whose jobs are tried as often as they are killed."""
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(decisions, "MAX_FAILURES", 1_000)
    store = new_store(folder)
    for project_id in PROJECTS[1:]:
        store.projects.ensure_project(project_id, "local")
    yield store
    store.close()


def add(store: Store, number: int) -> Job:
    """One of many jobs: every third project, half of them alone."""
    spec = sharing_spec(f"ftjob-{number}", engine=("auto", "off")[number // 3 % 2])
    job = Job(
        id=spec.job_id,
        project_id=PROJECTS[number % 3],
        created_at=0.0,
        request={},
        stored_spec=StoredSpec.of(spec),
        state=State.VALIDATING,
        slots=2,
    )
    return create_job(store, job)


def living(folder: Path) -> list[ProcessIdentity]:
    """Supervisors that live, of engines and of jobs that train alone; their ranks die with them."""
    roots = [*folder.glob("engines/*"), *folder.glob("runs/*")]
    written = [
        (root, path.relative_to(root).as_posix())
        for root in roots
        for path in root.glob("attempts/*/supervisor.json")
    ]
    found = [RunDir(root).readable(key, ProcessIdentity) for root, key in written]
    return [identity for identity in found if identity is not None and processes.is_alive(identity)]


def jobs_of(store: Store) -> list[Job]:
    return [
        job for project_id in PROJECTS for job in store.jobs.list_jobs(project_id, limit=JOBS).data
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_none_of_many_jobs_is_lost_or_doubled(seed: int, folder: Path, store: Store) -> None:
    chance = random.Random(seed)

    def service() -> Reconciler:
        scripts = "*:event,event,event,checkpoint=2,event,event,succeed"
        return engine_reconciler(folder, store, scripts, slots=SLOTS, idle_seconds=0.3)

    for number in range(JOBS):
        add(store, number)
    reconciler = service()
    killed = 0
    ended: Counter[str] = Counter()

    def turn() -> bool:
        nonlocal reconciler, killed, ended
        for _ in range(TURNS_PER_KILL):
            reconciler.step()
        alive = living(folder)
        if killed < KILLS and alive:
            processes.kill(chance.choice(alive))
            killed += 1
        if chance.random() < 0.05:
            reconciler = service()  # as after kill -9: nothing was said to the one before
        over = [job for job in jobs_of(store) if job.state in TERMINAL and job.phase is None]
        if not ended and len(over) >= JOBS // 2:
            ended = Counter(job.project_id for job in over)
        return len(over) == JOBS

    wait_for(turn, seconds=600)
    assert killed == KILLS
    jobs = jobs_of(store)
    assert {job.state for job in jobs} == {State.SUCCEEDED}
    assert len({job.id for job in jobs}) == JOBS
    shared = 0
    for job in jobs:
        run = RunDir(folder / "runs" / job.id)
        attempts = [Attempt(run, number) for number in range(1, job.attempt + 1)]
        # Not by exit records: a supervisor that is killed between the ranks' result and its record
        # leaves none.
        assert [attempt.read_result() is not None for attempt in attempts] == [False] * (
            job.attempt - 1
        ) + [True]
        starts = [attempt.read_start() for attempt in attempts]
        engines = [start.engine for start in starts if start is not None]
        assert len(engines) == job.attempt
        assert job.spec.engine == "auto" or not any(engines)
        shared += any(engines)
        result = attempts[-1].read_result()
        assert result is not None
        assert result.attempt == job.attempt
    assert shared > JOBS // 4
    assert min(ended.values()) >= 0.7 * max(ended.values()), (
        "projects with as many jobs get as much"
    )
    wait_for(lambda: (reconciler.step() or True) and not store.engines.live_engines())
    assert store.leases.free_slots(engine_launcher(folder, "", SLOTS).host, SLOTS) == list(
        range(SLOTS)
    )
    assert living(folder) == []
    used = store.usage.usage(UsageQuery(first_day=0, last_day=10**6, group_by=["project_id"]))
    for project_id in PROJECTS:
        mine = sum(job.slot_seconds for job in jobs if job.project_id == project_id)
        charged = sum(use.slot_seconds for use in used if use.project_id == project_id)
        assert charged >= mine - 1e-3, "what its jobs used, and the time of its engines without one"
