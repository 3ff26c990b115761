"""`/v1/fine_tuning/jobs`: jobs, their events, checkpoints, evaluations, data, logs and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from api.http import idempotency
from api.http.auth import Caller, known_project
from api.http.dependencies import (
    After,
    Cursor,
    JsonBody,
    OptionalJsonBody,
    Services,
    Svc,
    binary,
    body_schema,
    parse_body,
    server_sent,
)
from api.http.metadata_filter import metadata_filter
from api.http.routing import keyed_router
from api.http.threads import takes_turns
from api.transfer import event_stream, log_tail, tar_stream
from api.wire.data_views import SamplesView, StatisticsView, samples_view, statistics_view
from api.wire.job_views import (
    EvaluationView,
    JobUpdate,
    JobView,
    LiveProgress,
    ResumeBody,
    RolloutView,
    SuitesBody,
    evaluation_id,
    evaluation_view,
    job_view,
    rollout_id,
    rollout_view,
)
from api.wire.views import (
    CheckpointView,
    DeletedJobView,
    EventView,
    ListView,
    checkpoint_view,
    event_view,
    list_view,
)
from ft_service.control.admission import tuned_models
from ft_service.control.admission.budget import refuse_spent, refuse_without_price
from ft_service.control.admission.job_admission import (
    create_job,
    slots_to_resume_with,
)
from ft_service.control.checks.file_views import job_samples, job_statistics
from ft_service.control.jobs.costs import costs_of
from ft_service.control.jobs.ingest import cancel_job
from ft_service.data.sample_request import MOST_LINES, RecordRange
from ft_service.data.statistics import Measure
from ft_service.errors import NotFoundError, SpecError
from ft_service.jobs.states import Job, State
from ft_service.jobs.time_left import pace_of, seconds_left
from ft_service.jobs.user_actions import Verb
from ft_service.money import micros
from ft_service.reinforcement.step_records import recorded_steps
from ft_service.reinforcement.step_texts import read_texts
from ft_service.rundir.evaluations import (
    add_suites,
    evaluated_steps,
    read_evaluation,
    read_forgetting,
    read_served,
    read_suites,
)
from ft_service.rundir.events import Metrics
from ft_service.spec import JobRequest
from ft_service.store.records import Principal

router = keyed_router("/v1/fine_tuning/jobs", "fine-tuning")

Limit = Annotated[int, Query(ge=1, le=100)]


class JobQuery(BaseModel):
    """Filters of a list of jobs."""

    after: Cursor = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    metadata: Annotated[
        str | None,
        Field(
            description="`metadata[key]=value`: only jobs with this pair. `metadata=null`: only "
            "jobs without any."
        ),
    ] = None
    status: Annotated[
        list[State], Field(max_length=len(State), description="Only jobs in one of these states.")
    ] = []
    base: Annotated[
        str | None, Field(description="Name of a base model: only jobs that train on it.")
    ] = None
    suffix: Annotated[
        str | None,
        Field(
            max_length=64, description="Only jobs whose suffix or name contains it, in any case."
        ),
    ] = None
    project: Annotated[
        str | None,
        Field(description="Id of a project: its jobs instead of those of the key's project."),
    ] = None


@router.post("", response_model=JobView, openapi_extra=body_schema(JobRequest))
def create(
    request: Request,
    body: JsonBody,
    caller: Caller,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Any:
    """Create a job. Every option is checked first, and nothing is stored unless all are valid; the
    contents of the files are checked by the job itself (`validating_files`).
    """
    job_id = idempotency.keyed_id("ftjob-", idempotency_key, caller)
    context = services.admission(caller)

    def earlier() -> Job | None:
        return idempotency.earlier_job(services.store, caller, job_id, request.headers, body)

    job, is_new = idempotency.once(
        earlier, lambda: create_job(body, context, job_id, idempotency.last_look(request, earlier))
    )
    return job_view(job, caller.organization) if is_new else _view(job, caller, services)


@router.get("", response_model=ListView[JobView])
def list_jobs(
    request: Request, caller: Caller, services: Svc, query: Annotated[JobQuery, Query()]
) -> Any:
    """List jobs, the newest first.

    `metadata[k]=v`, any number of times: only jobs whose metadata contain all these pairs.
    `metadata=null`: only jobs without metadata. Not in OpenAI's API: `status`, `base` and `suffix`
    list only jobs in that state, on that base or with that in their suffix or name; `project` lists
    another project's jobs, for an admin key of the first project (to read their events, files and
    models, use a key of that project).
    """
    project_id = (
        caller.project_id
        if query.project is None
        else known_project(query.project, caller, services).id
    )
    page = services.store.jobs.list_jobs(
        project_id,
        after=query.after,
        limit=query.limit,
        metadata=metadata_filter(request),
        states=query.status,
        base=query.base,
        suffix=query.suffix,
    )
    return list_view([_view(job, caller, services) for job in page.data], page.has_more)


@router.get("/{job_id}")
def retrieve(job_id: str, caller: Caller, services: Svc) -> JobView:
    return _view(services.store.jobs.get_job(caller.project_id, job_id), caller, services)


@router.post("/{job_id}", openapi_extra=body_schema(JobUpdate))
def update(job_id: str, body: JsonBody, caller: Caller, services: Svc) -> JobView:
    """Not in OpenAI's API. Change what a job is called, or what is noted about it.

    Nothing that it trains or has trained changes, nor the name of its tuned model.
    """
    texts = parse_body(body, JobUpdate).model_dump(exclude_unset=True)
    return _view(services.store.jobs.call(caller.project_id, job_id, texts), caller, services)


@router.delete("/{job_id}")
def delete(job_id: str, caller: Caller, services: Svc) -> DeletedJobView:
    """Not in OpenAI's API. Delete a job that is over, with all that it has made: its tuned model
    and checkpoints, exports and saved weights, events, logs and its file of metrics. Uploaded files
    stay. Its models are found and served no more. Jobs that continue from one of them go on; its
    data goes once they are over. A job that is not over is refused: cancel it first.
    """
    return DeletedJobView(
        id=job_id, deleted_models=services.store.erasure.delete_job(caller.project_id, job_id)
    )


@router.post("/{job_id}/cancel")
def cancel(job_id: str, caller: Caller, services: Svc) -> JobView:
    """Cancel the job. Its status is `cancelled` at once; `phase` is `stopping` until its processes
    have ended. A job whose training has just written its result has succeeded, and can no longer be
    cancelled.
    """
    return _view(
        cancel_job(services.store, services.places, caller.project_id, job_id), caller, services
    )


@router.post("/{job_id}/pause")
def pause(job_id: str, caller: Caller, services: Svc) -> JobView:
    """Stop the job at a checkpoint and free its slots."""
    return _view(
        services.store.jobs.request(caller.project_id, job_id, Verb.PAUSE), caller, services
    )


@router.post("/{job_id}/resume", openapi_extra=body_schema(ResumeBody, required=False))
def resume(job_id: str, caller: Caller, services: Svc, body: OptionalJsonBody) -> JobView:
    """Continue from the last checkpoint; with a body (not in OpenAI's API), on another number of
    ranks, or with another `max_cost`.
    """
    slots = None
    changes = ResumeBody() if body is None else parse_body(body, ResumeBody)
    refuse_spent(services.store, caller.project_id, caller.limits.max_cost_per_month)
    if changes.max_cost is not None:
        job = services.store.jobs.get_job(caller.project_id, job_id)
        refuse_without_price(job)
    if changes.distributed is not None:
        job = services.store.jobs.get_job(caller.project_id, job_id)
        slots = slots_to_resume_with(
            job, changes.distributed.nproc_per_node, services.settings, caller.limits
        )
    max_cost = None if changes.max_cost is None else micros(changes.max_cost)
    resumed = services.store.jobs.request(
        caller.project_id, job_id, Verb.RESUME, slots, max_cost=max_cost
    )
    return _view(resumed, caller, services)


@router.post("/{job_id}/suites", openapi_extra=body_schema(SuitesBody))
def suites(job_id: str, body: JsonBody, caller: Caller, services: Svc) -> JobView:
    """Not in OpenAI's API. Keep accuracies of the job's tuned model and of its base, as `ft eval
    --suite` measures them, with the job (`suites`).
    """
    found = parse_body(body, SuitesBody)
    job = services.store.jobs.get_job(caller.project_id, job_id)
    if job.state is not State.SUCCEEDED:
        raise NotFoundError(
            f"Job {job.id} has no tuned model ({job.state.value}).",
            param="job_id",
            code="no_adapter",
        )
    add_suites(services.places.run(job.id), found)
    return _view(job, caller, services)


class EventQuery(BaseModel):
    """Filters of a list or stream of events.

    Scripts for OpenAI's API ask for 1,000 at once, to draw a loss curve.
    """

    after: Cursor = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    stream: bool = False
    type: Annotated[
        Literal["message"] | None, Field(description="Only messages, not the metrics of steps.")
    ] = None


@router.get("/{job_id}/events", response_model=ListView[EventView], responses=server_sent())
def events(
    job_id: str,
    caller: Caller,
    services: Svc,
    query: Annotated[EventQuery, Query()],
    last_event_id: Annotated[str | None, Header()] = None,
) -> Any:
    """List events, the newest first.

    `stream=true` (not in OpenAI's API): server-sent events instead, the oldest first, from the one
    after `Last-Event-ID` (or `after`) until the job has ended, then `[DONE]`; `limit` has no effect
    then.
    """
    if query.stream:
        return event_stream.response(services, caller, job_id, last_event_id or query.after)
    is_message = query.type is not None
    page = services.store.jobs.list_events(
        caller.project_id, job_id, after=query.after, limit=query.limit, messages=is_message
    )
    return list_view([event_view(event) for event in page.data], page.has_more)


@router.get("/{job_id}/samples")
@takes_turns("reading")
def samples(
    job_id: str,
    caller: Caller,
    services: Svc,
    after: Annotated[int, Query(ge=0, le=MOST_LINES)] = 0,
    limit: Limit = 10,
    file: Literal["training", "validation"] = "training",
) -> SamplesView:
    """Not in OpenAI's API. Show the samples after line `after` of a job's file as the model sees
    them: every token with its text and its role. It takes a second or two, and longer near the end
    of a large file.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    return samples_view(job_samples(job, file, RecordRange(after, limit), services.places))


@router.get("/{job_id}/evaluation", response_model=ListView[EvaluationView])
def evaluation(
    job_id: str, caller: Caller, services: Svc, after: After = None, limit: Limit = 10
) -> Any:
    """Not in OpenAI's API. List the answers of the job's model to the prompts of its `evaluation`,
    the newest step first; step 0, before training, is last. The list is empty for a job without
    `evaluation`, and until the first is written.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    run = services.places.run(job.id)
    keys = {
        evaluation_id(job_id, step): key for step, key in reversed(evaluated_steps(run).items())
    }
    if after is not None and after not in keys:
        raise NotFoundError(
            f"after = {after[:80]!r}: job {job.id} has no such evaluation.",
            param="after",
            code="no_evaluation",
        )
    remaining = list(keys)[list(keys).index(after) + 1 if after is not None else 0 :]
    evaluations = [read_evaluation(run, keys[name]) for name in remaining[:limit]]
    served = read_served(run)
    views = [
        evaluation_view(job_id, evaluation, served)
        for evaluation in evaluations
        if evaluation is not None
    ]
    return list_view(views, len(remaining) > limit)


@router.get("/{job_id}/rollouts", response_model=ListView[RolloutView])
@takes_turns("reading")
def rollouts(
    job_id: str,
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=20)] = 4,
    prompts: Annotated[
        int, Query(ge=1, le=100, description="Prompts of each step, and answers of each prompt.")
    ] = 16,
) -> Any:
    """Not in OpenAI's API. List the answers of a job of reinforcement learning with their rewards,
    the newest step first. The list is empty for other jobs, and until the first answers are graded;
    old steps go (`keep_rollouts`). With long answers it may be shorter than `limit`, and `has_more`
    is true.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    run = services.places.run(job.id)
    steps = {rollout_id(job_id, step): step for step in reversed(recorded_steps(run))}
    if after is not None and after not in steps:
        raise NotFoundError(
            f"after = {after[:80]!r}: job {job.id} has no such rollout.",
            param="after",
            code="no_rollout",
        )
    remaining = list(steps.values())[list(steps).index(after) + 1 if after is not None else 0 :]
    found = list(islice(read_texts(run, remaining, prompts), limit))
    return list_view(
        [rollout_view(job_id, texts) for texts in found],
        bool(found) and found[-1].head.step != remaining[-1],
    )


@router.get("/{job_id}/statistics")
@takes_turns("reading")
def statistics(job_id: str, caller: Caller, services: Svc) -> StatisticsView:
    """Not in OpenAI's API. Statistics of a job's files: lengths, targets, duplicates, overlap,
    steps, and warnings with suggested changes.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    planned = replace(
        job_statistics(job, services.places), seconds=job.planned_seconds, flops=job.work
    )
    return statistics_view(planned, Measure.of(job.spec))


@router.get("/{job_id}/checkpoints", response_model=ListView[CheckpointView])
def checkpoints(
    job_id: str, caller: Caller, services: Svc, after: After = None, limit: Limit = 10
) -> Any:
    """List complete checkpoints, the highest step first.

    Checkpoints that `save_total_limit` or an age limit has removed are not listed, unless their
    adapter had been made before.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    names = tuned_models.usable_checkpoints(job, services.places.run(job.id), services.store)
    page = services.store.jobs.list_checkpoints(
        caller.project_id, job_id, after=after, limit=limit, names=names
    )
    return list_view([checkpoint_view(point, job.tuned_name) for point in page.data], page.has_more)


@router.get(
    "/{job_id}/adapter", response_class=StreamingResponse, responses=binary("application/x-tar")
)
def adapter(job_id: str, caller: Caller, services: Svc) -> StreamingResponse:
    """Not in OpenAI's API. Download the tuned model as a tar archive: a folder `adapter/` that PEFT
    loads.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    if job.state is not State.SUCCEEDED:
        message = (
            f"Job {job.id} has no adapter ({job.state.value}); only a job that has "
            "succeeded has one."
        )
        raise NotFoundError(message, param="job_id", code="no_adapter")
    tuned = tuned_models.find_own(str(job.tuned_name), caller.project_id, services.store)
    return tar_stream.adapter_archive(tuned, services.places)


@router.get("/{job_id}/checkpoints/{checkpoint_id}/adapter", response_class=StreamingResponse)
@takes_turns("making")
def checkpoint_adapter(
    job_id: str, checkpoint_id: str, caller: Caller, services: Svc
) -> StreamingResponse:
    """Not in OpenAI's API. Download a checkpoint's adapter, like that of a job.

    Unless the workers wrote it with the checkpoint, the first call makes it from the shards in some
    seconds; if that is not possible, the answer is 404.
    """
    job = services.store.jobs.get_job(caller.project_id, job_id)
    tuned = tuned_models.find_checkpoint(checkpoint_id, caller.project_id, services.store)
    if tuned.job.id != job.id:
        raise NotFoundError(
            f"Job {job.id} has no checkpoint {checkpoint_id!r}.",
            param="checkpoint_id",
            code="no_checkpoint",
        )
    return tar_stream.adapter_archive(tuned, services.places)


class LogQuery(BaseModel):
    """Selection of log lines."""

    attempt: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    rank: Annotated[int | None, Field(ge=0, le=100_000)] = None
    lines: Annotated[int, Field(ge=1, le=10_000)] = 200
    follow: bool = False


@router.get(
    "/{job_id}/logs",
    response_class=PlainTextResponse,
    responses=binary("text/plain", "application/x-ndjson"),
)
def logs(
    job_id: str, caller: Caller, services: Svc, query: Annotated[LogQuery, Query()]
) -> Response:
    """Not in OpenAI's API. Show the last lines printed by the processes of an attempt (default: the
    newest), or by one rank. `follow=true`: lines of the newest attempt as JSON, `{attempt, source,
    line}`, and every further line until the job has ended or is paused. Where an engine trains the
    job, its output is shown, which is that of all its jobs.
    """
    attempt = query.attempt
    rank = query.rank
    lines = query.lines
    if query.follow and attempt is not None:
        raise SpecError(
            f"attempt = {attempt}: cannot be combined with follow, which shows the newest "
            "attempt. Remove one of them.",
            param="attempt",
        )
    if query.follow:
        return event_stream.follow_logs(services, caller, job_id, rank=rank, lines=lines)
    job = services.store.jobs.get_job(caller.project_id, job_id)
    number = attempt or job.attempt
    files = log_tail.attempt_logs(services.places, job.id, number, rank)
    if not files:
        who = "Attempt" if rank is None else f"Rank {rank} of attempt"
        message = (
            f"{who} {number} of job {job.id} has printed nothing."
            if number
            else f"Job {job.id} has not been started yet."
        )
        raise NotFoundError(message, param="attempt" if rank is None else "rank", code="no_logs")
    printed = {source: log_tail.tail(path, lines) for source, path in files.items()}
    shown = {source: text for source, text in printed.items() if text} or printed
    return PlainTextResponse(
        "\n".join(f"==> {source} <==\n{text}" for source, text in shown.items())
    )


def _view(job: Job, caller: Principal, services: Services) -> JobView:
    store = services.store
    steps = store.jobs.latest_steps(job.id) if job.state is State.RUNNING else []
    metrics = validated = (
        steps[0][0] if steps else store.jobs.latest_metrics(job.id) if job.attempt else None
    )
    if metrics is not None and metrics.valid_loss is None and job.known_spec.validates:
        validated = store.jobs.latest_validation(job.id)
    progress = LiveProgress(
        metrics=metrics,
        valid_loss=validated.valid_loss if validated else None,
        ends_at=_end_of(steps, store.now() if steps else 0.0),
        place=services.forecasts.find(job) if job.state is State.QUEUED else None,
        forgetting=read_forgetting(services.places.run(job.id))
        if job.state is State.SUCCEEDED
        else None,
        suites=read_suites(services.places.run(job.id)) if job.state is State.SUCCEEDED else None,
        cost=costs_of(store, [job])[job.id],
    )
    return job_view(job, caller.organization, progress)


def _end_of(steps: Sequence[tuple[Metrics, float]], now: float) -> float | None:
    """Return the likely end of a running job, in seconds since the epoch.

    `steps`: metrics with times, newest first.
    """
    if not steps:
        return None
    newest, reported_at = steps[0]
    pace = pace_of(metrics for metrics, _ in reversed(steps))
    left = seconds_left(pace, newest.step, newest.total_steps, since=now - reported_at)
    return None if left is None else now + left
