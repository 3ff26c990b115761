"""`/v1/fine_tuning/jobs/{job_id}/metrics` and `/v1/fine_tuning/metrics`: the numbers of jobs by step, ready to be drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Header, Query, Response

from api.http.auth import Caller
from api.http.dependencies import Svc
from api.http.routing import keyed_router
from api.wire.metrics_views import MetricsListView, MetricsView, metrics_view
from ft_service.jobs.states import Job
from ft_service.store.rows import not_found

router = keyed_router("/v1/fine_tuning", "fine-tuning")

Points = Annotated[int, Query(ge=4, le=1000, description="Points of a series at most; of more, the extremes are kept.")]
Name = Literal[
    "train_loss",
    "valid_loss",
    "train_mean_token_accuracy",
    "valid_mean_token_accuracy",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
]
Names = Annotated[list[Name] | None, Query(description="Only these; default: every one that was reported.")]
_MARKED = 200


@router.get("/jobs/{job_id}/metrics", response_model=MetricsView, responses={304: {"description": "Nothing is new."}})
def of_job(
    job_id: str,
    caller: Caller,
    services: Svc,
    points: Points = 1000,
    series: Names = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Any:
    """Not in OpenAI's API. What a job reported by step, over all its attempts (a step that was trained again counts as its
    newest attempt saw it), and what happened on the way: attempts, pauses, checkpoints. With the `ETag` of the answer before
    as `If-None-Match`, the answer is a 304 if nothing is new."""
    job = services.store.get_job(caller.project_id, job_id)
    names = tuple(series or ())
    checkpoints = services.store.list_checkpoints(job.project_id, job.id, limit=_MARKED).data
    newest = checkpoints[0].id if checkpoints else "-"
    body, position = services.curves.look(
        job,
        ("written", points, names),
        (job.state, len(checkpoints), newest),
        lambda curves: metrics_view(job, curves, checkpoints, points, names).model_dump_json().encode(),
    )
    tag = f'"{position}-{len(checkpoints)}-{newest}-{job.state}-{points}-{",".join(names)}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if if_none_match == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


@router.get("/metrics")
def of_jobs(
    caller: Caller,
    services: Svc,
    job: Annotated[list[str], Query(min_length=1, max_length=100, description="Ids of jobs.")],
    points: Points = 1000,
    series: Names = None,
) -> MetricsListView:
    """Not in OpenAI's API. The same of several jobs, in their order; of checkpoints nothing is said."""
    found = {one.id: one for one in services.store.jobs_by_id(job) if one.project_id == caller.project_id}
    if missing := [job_id for job_id in job if job_id not in found]:
        raise not_found("fine-tuning job", missing[0])
    names = tuple(series or ())

    def view(one: Job) -> MetricsView:
        made, _ = services.curves.look(
            one, ("view", points, names), one.state, lambda curves: metrics_view(one, curves, [], points, names)
        )
        return made

    return MetricsListView(data=[view(found[job_id]) for job_id in job])
