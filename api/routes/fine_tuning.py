"""`/v1/fine_tuning/jobs`: OpenAI's job resource, and the artefacts of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from api.http import idempotency
from api.http.auth import Caller, known_project
from api.http.dependencies import (
    After,
    JsonBody,
    OptionalJsonBody,
    Services,
    Svc,
    binary,
    body_schema,
    parse_body,
    server_sent,
)
from api.http.routing import BareRoute, keyed_router, written
from api.http.threads import in_thread, takes_turns
from api.transfer import adapter_download, event_stream, log_tail
from api.wire.evaluation_views import EvaluationView, evaluation_id, evaluation_view
from api.wire.job_views import JobView, ResumeBody, job_view
from api.wire.sample_views import SamplesView, samples_view
from api.wire.statistics_views import StatisticsView, statistics_view
from api.wire.views import (
    CheckpointView,
    EventView,
    ListView,
    checkpoint_view,
    event_view,
    list_view,
)
from ft_service.control import tuned_models
from ft_service.control.admission import read, slots_to_resume_with, takes_time
from ft_service.control.checks.file_statistics import job_statistics
from ft_service.control.checks.samples import job_samples
from ft_service.control.intake import cancel_job
from ft_service.data.samples import MOST_LINES, Page
from ft_service.data.statistics import Measure
from ft_service.errors import ConflictError, NotFoundError, SpecError
from ft_service.jobs.states import Job, State
from ft_service.jobs.time_left import pace_of, seconds_left
from ft_service.jobs.verbs import Verb
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import evaluated_steps, read_evaluation, read_served
from ft_service.rundir.events import Metrics
from ft_service.spec import JobRequest
from ft_service.store.records import Principal

router = keyed_router("/v1/fine_tuning/jobs", "fine-tuning")

_METADATA = re.compile(r"metadata\[(.+)\]", re.DOTALL)


async def create(
    request: Request, body: JsonBody, caller: Caller, services: Svc, idempotency_key: Annotated[str | None, Header()] = None
) -> Response:
    """Create a job. Every option is checked first, and nothing is stored unless all are fine; the contents of the files are
    checked by the job itself (`validating_files`)."""
    job_id = idempotency.keyed_job_id(idempotency_key, caller)
    earlier = partial(_earlier, job_id, request, body, caller, services)
    if (job_id or idempotency.is_retry(request.headers)) and (created_before := await in_thread(earlier)):
        return created_before
    try:
        job = await _create(body, caller, services, job_id, is_large=request.state.body_is_large)
    except ConflictError:  # the same request arrived twice at once, and the other one has just created the job
        if not (job_id and (created_before := await in_thread(earlier))):
            raise
        return created_before
    return written(job_view(job, organization=caller.organization))


_CREATE = {"response_model": JobView, "openapi_extra": body_schema(JobRequest)}
router.add_api_route("", create, methods=["POST"], route_class_override=BareRoute, **_CREATE)


@router.get("", response_model=ListView[JobView])
def list_jobs(
    request: Request,
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    status: State | None = None,
    base: Annotated[str | None, Query(description="Name of a base model: only jobs that train on it.")] = None,
    project: Annotated[str | None, Query(description="Id of a project: its jobs, not those of the key's own.")] = None,
) -> Any:
    """Newest first. `metadata[k]=v`, any number of times: only jobs whose metadata hold all these pairs. `metadata=null`: only
    jobs without metadata. `status` and `base`, which OpenAI's API has not: only jobs in that state, on that base. `project`,
    which it has not either: another project's jobs, for an admin key of the first project; their events, files and models are
    for keys of that project."""
    whose = caller.project_id if project is None else known_project(project, caller, services).id
    page = services.store.list_jobs(whose, after=after, limit=limit, metadata=_metadata(request), state=status, base=base)
    return list_view([_view(job, caller, services) for job in page.data], page.has_more)


@router.get("/{job_id}")
def retrieve(job_id: str, caller: Caller, services: Svc) -> JobView:
    return _view(services.store.get_job(caller.project_id, job_id), caller, services)


@router.post("/{job_id}/cancel")
def cancel(job_id: str, caller: Caller, services: Svc) -> JobView:
    """End the job. It answers `cancelled` at once; `phase` says `stopping` until its processes are gone. One whose training has
    left its result in this moment has succeeded, and cannot be cancelled any more."""
    return _view(cancel_job(services.store, services.places, caller.project_id, job_id), caller, services)


@router.post("/{job_id}/pause")
def pause(job_id: str, caller: Caller, services: Svc) -> JobView:
    """Stop at a checkpoint and free the slots."""
    return _view(services.store.request(caller.project_id, job_id, Verb.PAUSE), caller, services)


@router.post("/{job_id}/resume", openapi_extra=body_schema(ResumeBody, required=False))
def resume(job_id: str, caller: Caller, services: Svc, body: OptionalJsonBody) -> JobView:
    """Go on from the last checkpoint; with a body, which OpenAI's API has not, on another number of ranks."""
    slots = None
    asked = ResumeBody() if body is None else parse_body(body, ResumeBody)
    if asked.distributed is not None:
        job = services.store.get_job(caller.project_id, job_id)
        slots = slots_to_resume_with(job, asked.distributed.nproc_per_node, services.store, services.settings, caller.limits)
    return _view(services.store.request(caller.project_id, job_id, Verb.RESUME, slots), caller, services)


@router.get("/{job_id}/events", response_model=ListView[EventView], responses=server_sent())
def events(
    job_id: str,
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    stream: bool = False,
    kind: Annotated[Literal["message"] | None, Query(alias="type", description="Only messages, no numbers of steps.")] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Newest first. `stream=true` (not in OpenAI's API): server-sent events instead, the oldest first, from the one after
    `Last-Event-ID` (or `after`) until the job has ended, then `[DONE]`; `limit` has no effect then."""
    if stream:
        return event_stream.response(services, caller, job_id, last_event_id or after)
    page = services.store.list_events(caller.project_id, job_id, after=after, limit=limit, messages=kind is not None)
    return list_view([event_view(event) for event in page.data], page.has_more)


@router.get("/{job_id}/samples")
@takes_turns("reading")
def samples(
    job_id: str,
    caller: Caller,
    services: Svc,
    after: Annotated[int, Query(ge=0, le=MOST_LINES)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
    file: Literal["training", "validation"] = "training",
) -> SamplesView:
    """Not in OpenAI's API. Samples of a job's file as the model sees them, behind the line `after`: every token with its text
    and its role. It takes a second or two, and longer far down a large file."""
    job = services.store.get_job(caller.project_id, job_id)
    return samples_view(job_samples(job, file, Page(after, limit), services.places))


@router.get("/{job_id}/evaluation", response_model=ListView[EvaluationView])
def evaluation(
    job_id: str, caller: Caller, services: Svc, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 10
) -> Any:
    """Not in OpenAI's API. What the job's model answers to the prompts of its `evaluation`, beside what it answered before
    training: the newest step first, and step 0, before training, last. Empty without one, and until it is written."""
    job = services.store.get_job(caller.project_id, job_id)
    run = _run_dir(job, services)
    keys = {evaluation_id(job_id, step): key for step, key in reversed(evaluated_steps(run).items())}
    if after is not None and after not in keys:
        raise NotFoundError(
            f"after = {after[:80]!r}: job {job.id} has no such evaluation.", param="after", code="no_evaluation"
        )
    waiting = list(keys)[list(keys).index(after) + 1 if after is not None else 0 :]
    found = [read_evaluation(run, keys[name]) for name in waiting[:limit]]
    served = read_served(run)
    return list_view([evaluation_view(job_id, own, served) for own in found if own is not None], len(waiting) > limit)


@router.get("/{job_id}/statistics")
@takes_turns("reading")
def statistics(job_id: str, caller: Caller, services: Svc) -> StatisticsView:
    """Not in OpenAI's API. What a job trains on, in numbers: lengths, targets, doubles, overlap of its files, steps, and
    warnings that say what to change."""
    job = services.store.get_job(caller.project_id, job_id)
    found = job_statistics(job, services.places)
    return statistics_view(replace(found, seconds=job.planned_seconds, flops=job.work), Measure.of(job.spec))


@router.get("/{job_id}/checkpoints", response_model=ListView[CheckpointView])
def checkpoints(
    job_id: str, caller: Caller, services: Svc, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 10
) -> Any:
    """Complete checkpoints that are still there, the highest step first: those that `save_total_limit` or an age limit has
    removed are not listed, unless their adapter was made before."""
    job = services.store.get_job(caller.project_id, job_id)
    there = tuned_models.usable_checkpoints(job, _run_dir(job, services), services.store)
    page = services.store.list_checkpoints(caller.project_id, job_id, after=after, limit=limit, names=there)
    return list_view([checkpoint_view(point, job.tuned_name) for point in page.data], page.has_more)


@router.get("/{job_id}/adapter", response_class=StreamingResponse, responses=binary("application/x-tar"))
def adapter(job_id: str, caller: Caller, services: Svc) -> StreamingResponse:
    """Not in OpenAI's API. The outcome as a tar archive: a folder `adapter/` that PEFT loads."""
    job = services.store.get_job(caller.project_id, job_id)
    if job.state is not State.SUCCEEDED:
        message = f"Job {job.id} has no adapter ({job.state.value}); a job that has succeeded has one."
        raise NotFoundError(message, param="job_id", code="no_adapter")
    return adapter_download.archived(
        tuned_models.find_own(str(job.tuned_name), caller.project_id, services.store), services.places
    )


@router.get("/{job_id}/checkpoints/{checkpoint_id}/adapter", response_class=StreamingResponse)
@takes_turns("making")
def checkpoint_adapter(job_id: str, checkpoint_id: str, caller: Caller, services: Svc) -> StreamingResponse:
    """Not in OpenAI's API. A checkpoint's adapter, as that of a job. Unless the workers wrote it with the checkpoint, it is
    made from the shards at the first call, which takes some seconds; a 404 says so where that cannot be done."""
    job = services.store.get_job(caller.project_id, job_id)
    tuned = tuned_models.find_checkpoint(checkpoint_id, caller.project_id, services.store)
    if tuned.job.id != job.id:
        raise NotFoundError(f"Job {job.id} has no checkpoint {checkpoint_id!r}.", param="checkpoint_id", code="no_checkpoint")
    return adapter_download.archived(tuned, services.places)


@router.get("/{job_id}/logs", response_class=PlainTextResponse, responses=binary("text/plain", "application/x-ndjson"))
def logs(
    job_id: str,
    caller: Caller,
    services: Svc,
    attempt: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    rank: Annotated[int | None, Query(ge=0, le=100_000)] = None,
    lines: Annotated[int, Query(ge=1, le=10_000)] = 200,
    follow: bool = False,
) -> Response:
    """Not in OpenAI's API. The last lines of everything that the processes of an attempt (default: the newest) have printed, or
    one rank of it. `follow=true`: the newest attempt's as JSON lines `{attempt, source, line}`, and all that comes until the
    job is over or rests paused."""
    if follow and attempt is not None:
        raise SpecError(f"attempt = {attempt}: has no effect with follow, which shows the newest. Keep one.", param="attempt")
    if follow:
        return event_stream.follow_logs(services, caller, job_id, rank=rank, lines=lines)
    job = services.store.get_job(caller.project_id, job_id)
    number = attempt or job.attempt
    files = log_tail.log_files(Attempt(_run_dir(job, services), number).find_logs(), rank)
    if not files:
        who = "Attempt" if rank is None else f"Rank {rank} of attempt"
        message = (
            f"{who} {number} of job {job.id} has printed nothing." if number else f"Job {job.id} has not been started yet."
        )
        raise NotFoundError(message, param="attempt" if rank is None else "rank", code="no_logs")
    printed = {source: log_tail.tail(path, lines) for source, path in files.items()}
    said = {source: text for source, text in printed.items() if text} or printed
    return PlainTextResponse("\n".join(f"==> {source} <==\n{text}" for source, text in said.items()))


def _earlier(job_id: str | None, request: Request, body: Any, caller: Principal, services: Services) -> Response | None:
    """The job that this very request, or an earlier try of it, created."""
    if job_id:
        job = idempotency.keyed_job(services.store, caller, job_id, body)
    else:
        job = idempotency.repeated_job(services.store, caller, body)
    return job and written(_view(job, caller, services))


async def _create(body: Any, caller: Principal, services: Services, job_id: str | None, *, is_large: bool) -> Job:
    reading = partial(read, body, principal=caller, store=services.store, settings=services.settings, job_id=job_id)
    if is_large:
        return await services.create_large_job(await in_thread(reading))
    return await services.create_job(await in_thread(reading) if takes_time(body) else reading())


def _view(job: Job, caller: Principal, services: Services) -> JobView:
    store = services.store
    steps = store.latest_steps(job.id) if job.state is State.RUNNING else []
    metrics = validated = steps[0][0] if steps else store.latest_metrics(job.id) if job.attempt else None
    if metrics is not None and metrics.valid_loss is None and job.spec.validates:
        validated = store.latest_validation(job.id)
    return job_view(
        job,
        organization=caller.organization,
        metrics=metrics,
        ends_at=_end_of(steps, store.now() if steps else 0.0),
        place=services.forecasts.find(job) if job.state is State.QUEUED else None,
        valid_loss=validated.valid_loss if validated else None,
    )


def _end_of(steps: Sequence[tuple[Metrics, float]], now: float) -> float | None:
    """When a running job likely ends. `steps`: what it reported and when, the newest first."""
    if not steps:
        return None
    newest, reported_at = steps[0]
    pace = pace_of(metrics for metrics, _ in reversed(steps))
    left = seconds_left(pace, newest.step, newest.total_steps, since=now - reported_at)
    return None if left is None else now + left


def _metadata(request: Request) -> dict[str, str] | Literal["none"] | None:
    """The pairs of `metadata[k]=v`, "none" for `metadata=null`. Raises SpecError for other forms, instead of listing
    everything.
    """
    given = [(name, value) for name, value in request.query_params.multi_items() if name.startswith("metadata")]
    if given == [("metadata", "null")]:
        return "none"
    pairs: dict[str, str] = {}
    for name, value in given:
        match = _METADATA.fullmatch(name)
        if match is None:
            raise SpecError(
                f"{name[:80]} = {value[:80]!r}: filter by metadata[key]=value, or by metadata=null alone.", param="metadata"
            )
        if pairs.setdefault(match[1], value) != value:
            raise SpecError(f"{name[:80]} is given twice, with different values: no job can have both.", param=name[:80])
    return pairs or None


def _run_dir(job: Job, services: Services) -> RunDir:
    return services.places.run(job.id)
