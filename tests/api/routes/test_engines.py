from __future__ import annotations

from ft_service.jobs.decisions import placed
from ft_service.jobs.states import State
from ft_service.store.records import JobChange, NewEngine
from tests.support.creating import create_job
from tests.support.records import new_job
from tests.support.rest.service import Service


def test_a_project_sees_its_own_engines(service: Service) -> None:
    assert service.http("GET", "/v1/engines").json()["data"] == []
    service.store.projects.ensure_project("other", "local")
    ids = []
    for number, project_id in enumerate(("default", "other")):
        job = create_job(service.store, new_job(project_id=project_id, state=State.QUEUED, slots=2, share_key="key"))
        claim = service.store.leases.claim_queued(job.id, host="h", owner="t", lease_seconds=60, host_slots=8)
        assert claim is not None
        ids.append(job.id)
        change = JobChange(
            job=placed(claim.job, "h", engine_id=f"engine-{number}"),
            take_slots=[2 * number, 2 * number + 1],
            new_engine=NewEngine(8),
        )
        assert service.store.leases.apply(claim, change)
    (engine,) = service.http("GET", "/v1/engines").json()["data"]
    assert engine.pop("created_at") > 0
    assert engine == {
        "id": "engine-0",
        "object": "engine",
        "base": "some-base",
        "ranks": 2,
        "most_jobs": 8,
        "jobs": ids[:1],
        "ending": False,
    }
