"""What a job takes before it runs, and whether it would be taken: `POST /v1/fine_tuning/plan` and `check`; the plan and the
create body of a job that is there."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from api.http.auth import Caller
from api.http.dependencies import JsonBody, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from ft_service.control import planning
from ft_service.control.checks import dry_run
from ft_service.control.checks.dry_run import CheckRequest
from ft_service.spec import JobRequest

router = keyed_router("/v1/fine_tuning", "fine-tuning")

_PLAN: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}


class CheckView(BaseModel):
    """A job or a sweep that would be taken."""

    object: Literal["fine_tuning.check"] = "fine_tuning.check"
    accepted: Literal[True] = True
    jobs: int
    """How many it would be: 1, or those of the sweep."""


@router.post("/plan", openapi_extra=body_schema(JobRequest), responses=_PLAN)
def of_body(body: JsonBody, caller: Caller, services: Svc) -> Response:
    """Not in OpenAI's API. What a job with this create body would take on each rank, on the wire and in time, whether it fits,
    and which changes would help. `training_file` may be missing. Nothing is stored."""
    return JSONResponse(
        planning.plan_body(
            body,
            principal=caller,
            store=services.store,
            settings=services.settings,
            catalogue=services.catalogue,
            places=services.places,
        )
    )


@router.post("/check", openapi_extra=body_schema(CheckRequest))
def check(body: JsonBody, caller: Caller, services: Svc) -> CheckView:
    """Not in OpenAI's API. Whether a job or a sweep with this create body would be taken, before its files are uploaded: what
    the creation would refuse is refused in the same words. Nothing is stored."""
    asked = parse_body(body, CheckRequest)
    jobs = dry_run.check(
        asked, principal=caller, store=services.store, settings=services.settings, catalogue=services.catalogue
    )
    return CheckView(jobs=jobs)


@router.get("/jobs/{job_id}/plan", responses=_PLAN)
def of_job(job_id: str, caller: Caller, services: Svc) -> Response:
    """Not in OpenAI's API. The same of a job that is there, as its options were chosen."""
    job = services.store.get_job(caller.project_id, job_id)
    return JSONResponse(planning.plan_of_job(job, services.store, services.settings, services.places))


@router.get("/jobs/{job_id}/request", responses=_PLAN)
def request(job_id: str, caller: Caller, services: Svc) -> Response:
    """Not in OpenAI's API. The body that the job was created with, to create another one."""
    return JSONResponse(services.store.get_job(caller.project_id, job_id).request)
