"""`/v1/fine_tuning/jobs/{job_id}/metrics` and `/v1/fine_tuning/metrics`: metrics of jobs by step,
for charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Header, Query, Response

from api.http.auth import Caller
from api.http.dependencies import Services, Svc
from api.http.routing import keyed_router
from api.wire.views import View
from ft_service.jobs.curves import (
    GPU_NAMES,
    NAMES,
    Curves,
    GpuName,
    Kind,
    Name,
    gpu_series,
)
from ft_service.jobs.states import Job
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import GpuLoad
from ft_service.store.records import Checkpoint
from ft_service.store.rows import not_found

router = keyed_router("/v1/fine_tuning", "fine-tuning")

Points = Annotated[
    int,
    Query(
        ge=4, le=1000, description="Most points of a series; a longer series keeps its extremes."
    ),
]
Names = Annotated[
    list[Name | GpuName] | None,
    Query(description="Only these series; default: all that were reported."),
]
_MARKED_CHECKPOINTS = 200
_ATTEMPTS_WITH_LOADS = 8
"""Attempts of which is read what their GPUs did: the newest."""


class SeriesView(View):
    """A metric by step: three lists of the same length, in order of the steps."""

    steps: list[int]
    times: list[float]
    """Seconds since the epoch."""
    values: list[float]


class MarkView(View):
    """An event on the time line of a job."""

    type: Kind
    step: int
    """The newest step at that time."""
    time: float
    label: str
    """The attempt's number, or the checkpoint's id."""


class MetricsView(View):
    object: Literal["fine_tuning.job.metrics"] = "fine_tuning.job.metrics"
    job_id: str
    status: str
    step: int
    """The newest step; 0: none yet."""
    total_steps: int
    series: dict[str, SeriesView]
    """Name → series. Metrics that were never reported are left out."""
    marks: list[MarkView]


class MetricsListView(View):
    object: Literal["list"] = "list"
    data: list[MetricsView]


@router.get(
    "/jobs/{job_id}/metrics",
    response_model=MetricsView,
    responses={304: {"description": "Nothing is new."}},
)
def of_job(
    job_id: str,
    caller: Caller,
    services: Svc,
    points: Points = 1000,
    series: Names = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Any:
    """Not in OpenAI's API. Return a job's metrics by step, over all its attempts (a step that was
    trained again has the metrics of its newest attempt), and marks for attempts, pauses and
    checkpoints; of a job on GPUs also what those of its first node did (`gpu/…`).

    With the `ETag` of the previous answer as `If-None-Match`, the answer is 304 if nothing is new.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    names = tuple(series or ())
    checkpoints = services.store.jobs.list_checkpoints(
        job.project_id, job.id, limit=_MARKED_CHECKPOINTS
    ).data
    newest = checkpoints[0].id if checkpoints else "-"
    loads = _gpu_loads(services, job) if not names or set(names) & set(GPU_NAMES) else []
    last = loads[-1].time if loads else 0.0
    body, position = services.curves.derived(
        job,
        ("json", points, names),
        (job.state, len(checkpoints), newest, last),
        lambda curves: (
            _view(job, curves, points, names, checkpoints, loads).model_dump_json().encode()
        ),
    )
    tag = f'"{position}-{len(checkpoints)}-{newest}-{last}-{job.state}-{points}-{",".join(names)}"'
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
    """Not in OpenAI's API. Return the metrics of several jobs, in the order of `job`, without marks
    for checkpoints.
    """
    known = {
        record.id: record
        for record in services.store.jobs.jobs_by_id(job)
        if record.project_id == caller.project_id
    }
    if missing := [job_id for job_id in job if job_id not in known]:
        raise not_found("fine-tuning job", missing[0])
    names = tuple(series or ())

    def view(record: Job) -> MetricsView:
        key = ("view", points, names)
        return services.curves.derived(
            record, key, record.state, lambda curves: _view(record, curves, points, names)
        )[0]

    return MetricsListView(data=[view(known[job_id]) for job_id in job])


def _gpu_loads(services: Services, job: Job) -> list[GpuLoad]:
    """What the GPUs of a job's newest attempts did, oldest first; of a job in an engine nothing."""
    run = services.places.run(job.id)
    numbers = range(max(1, job.attempt - _ATTEMPTS_WITH_LOADS + 1), job.attempt + 1)
    return [load for number in numbers for load in Attempt(run, number).gpu_loads(job.nodes)]


def _view(
    job: Job,
    curves: Curves,
    points: int,
    names: Sequence[str],
    checkpoints: Sequence[Checkpoint] = (),
    loads: Sequence[GpuLoad] = (),
) -> MetricsView:
    """Return the metrics of a job. `names`: the series to return; empty: all. `loads`: of its
    GPUs.
    """
    series = {name: curves.series(name, points) for name in names or NAMES if name in NAMES}
    of_gpus = gpu_series(curves, loads, points)
    series |= {name: found for name, found in of_gpus.items() if not names or name in names}
    marks = [
        MarkView(type=mark.kind, step=mark.step, time=mark.time, label=mark.label)
        for mark in curves.marks
    ]
    marks += [
        MarkView(type="checkpoint", step=point.step, time=point.created_at, label=point.id)
        for point in reversed(checkpoints)
    ]
    return MetricsView(
        job_id=job.id,
        status=job.state.value,
        step=curves.step,
        total_steps=curves.total_steps,
        series={name: SeriesView.of(points) for name, points in series.items() if points.values},
        marks=marks,
    )
