"""Jobs that an engine trains, as the database has them."""

from __future__ import annotations

from typing import Any

from ft_service.jobs.decisions import placed
from ft_service.jobs.states import State
from ft_service.store.records import JobChange, NewEngine
from tests.support.creating import create_job
from tests.support.records import new_job
from tests.support.rest.service import Service


def seated_job(
    service: Service,
    engine_id: str,
    *,
    slots: list[int],
    project_id: str = "default",
    **values: Any,
) -> str:
    """Id of a new job that an engine trains, which is new too if `slots` are given.
    `values`: of the job."""
    job = create_job(
        service.store,
        new_job(project_id=project_id, state=State.QUEUED, slots=2, share_key="key", **values),
    )
    claim = service.store.leases.claim_queued(
        job.id, host="h", owner="t", lease_seconds=60, host_slots=8
    )
    assert claim is not None
    new = NewEngine(8) if slots else None
    change = JobChange(
        job=placed(claim.job, "h", engine_id=engine_id), take_slots=slots, new_engine=new
    )
    assert service.store.leases.apply(claim, change)
    return job.id
