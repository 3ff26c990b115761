"""`POST /v1/fine_tuning/plan` and `check`: the resources that a job would take, and whether it
would be accepted; the plan and the create body of an existing job.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from api.http.auth import Caller
from api.http.dependencies import JsonBody, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from ft_service.control.admission import dry_run, planning
from ft_service.control.admission.dry_run import CheckRequest
from ft_service.spec import JobRequest

router = keyed_router("/v1/fine_tuning", "fine-tuning")

PLAN: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}}
}


class CheckView(BaseModel):
    """A job or a sweep that would be accepted."""

    object: Literal["fine_tuning.check"] = "fine_tuning.check"
    accepted: Literal[True] = True
    jobs: int
    """Number of jobs: 1, or those of the sweep."""


@router.post("/plan", openapi_extra=body_schema(JobRequest), responses=PLAN)
def of_body(body: JsonBody, caller: Caller, services: Svc) -> Response:
    """Not in OpenAI's API. Plan a job with this create body: memory of each rank, network traffic
    and time, whether it fits, and changes that would help. `training_file` may be missing. Nothing
    is stored.
    """
    context = services.admission(caller)
    return JSONResponse(planning.plan_body(body, context, services.places))


@router.post("/check", openapi_extra=body_schema(CheckRequest))
def check(body: JsonBody, caller: Caller, services: Svc) -> CheckView:
    """Not in OpenAI's API. Check whether a job or a sweep with this create body would be accepted,
    before its files are uploaded. A refusal has the words of the creation's. Nothing is stored.
    """
    context = services.admission(caller)
    jobs = dry_run.check(parse_body(body, CheckRequest), context)
    return CheckView(jobs=jobs)


@router.get("/jobs/{job_id}/plan", responses=PLAN)
def of_job(job_id: str, caller: Caller, services: Svc) -> Response:
    """Not in OpenAI's API. The plan of an existing job, with its options as they were chosen."""
    job = services.store.jobs.get_job(caller.project_id, job_id)
    return JSONResponse(
        planning.plan_of_job(
            job, services.settings, services.places, services.catalogue.descriptions
        )
    )


@router.get("/jobs/{job_id}/request", responses=PLAN)
def request(job_id: str, caller: Caller, services: Svc) -> Response:
    """Not in OpenAI's API. The body that the job was created with, for the creation of another
    one.
    """
    return JSONResponse(services.store.jobs.get_job(caller.project_id, job_id).request)
