"""Transfer from a run directory to the store: reports of an attempt, results of a finished job, and
whether a job that is being cancelled has finished already.
"""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from ft_service.errors import UnavailableError
from ft_service.ids import new_id
from ft_service.jobs.states import ALONE, Ended, Job, Level, Observation, State
from ft_service.jobs.user_actions import Verb
from ft_service.money import co2_grams
from ft_service.plan.fitting_settings import COMPILE, FITTED, FORMAT, is_open, value_of
from ft_service.rundir.attempt import RESULT, Attempt, unreadable_exit
from ft_service.rundir.checkpoints import CHECKPOINT_NAME
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import ExitReason, Result
from ft_service.rundir.events import Event, read_segments
from ft_service.rundir.file_digest import FileDigest
from ft_service.spec import JobSpec, StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import Checkpoint, File, NewEvent, Sweep
from ft_service.store.sql import Store
from ft_service.sweeps.halving import SweepJobProgress

SEGMENTS_PER_PASS = 50
"""Limit of what one change writes; the rest follows in the next pass."""
_MOST_SECONDS = 1e9
"""Limit of the time left of a job."""
RESULTS_PURPOSE = "fine-tune-results"
RESULTS_NAME = "step_metrics.csv"


@dataclass(frozen=True)
class Intake:
    """New events of the newest attempt, ready to be stored.

    `more`: further ones wait for the next pass.
    """

    job: Job
    events: list[NewEvent]
    checkpoints: list[Checkpoint]
    more: bool


def read_report(run: RunDir, job: Job, now: float) -> Intake:
    """What the newest attempt reported since `job.ingested`, with its expected end.

    A malformed event is reported once per attempt. `now`: database time.
    """
    segments = (
        read_segments(run, job.attempt, job.ingested, SEGMENTS_PER_PASS) if job.attempt else []
    )
    lines = [
        ((segment.seq, line), event)
        for segment in segments
        for line, event in enumerate(segment.events)
    ]
    reported = [event for _, event in lines]
    faults = [
        note_event(segment.fault, "warn") for segment in segments if segment.fault is not None
    ]
    found = [found for _, event in lines if (found := _checkpoint(job, event)) is not None]
    seen = _with_choices(_with_sweep_course(_with_progress(job, reported, now), reported), reported)
    if found and job.fault_group == ALONE and job.engine_id is None:
        seen = replace(seen, fault_group=None)  # it trains well without others beside it
    return Intake(
        job=replace(seen, ingested=segments[-1].seq) if segments else job,
        events=[*(_new_event(source, event) for source, event in lines), *faults],
        checkpoints=found,
        more=len(segments) == SEGMENTS_PER_PASS,
    )


def _with_progress(job: Job, events: Sequence[Event], now: float) -> Job:
    """The job with its trained tokens, and the time left by the median of its newest steps (one
    alone may have waited for a checkpoint).
    """
    steps = [
        event.metrics for event in events if event.kind == "metrics" and event.metrics is not None
    ]
    if steps:
        job = replace(
            job,
            seen_tokens=max(job.seen_tokens, *(metrics.trained_tokens or 0 for metrics in steps)),
        )
    seconds = [metrics.step_seconds for metrics in steps if metrics.step_seconds is not None]
    if not seconds:
        return job
    left = min(_MOST_SECONDS, max(0, steps[-1].total_steps - steps[-1].step) * median(seconds))
    return replace(job, left_seconds=left, ends_at=now + left)


def with_energy(job: Job, run: RunDir) -> Job:
    """The job with the energy that its newest attempt has reported, unless an engine trains it.

    A report that fell, as an attempt's never does, changes nothing.
    """
    if not job.attempt or job.engine_id is not None:
        return job
    reported = Attempt(run, job.attempt).joules(job.nodes)
    more = (reported or 0.0) - (job.attempt_joules or 0.0)
    if reported is None or more < 0 or (more == 0 and job.attempt_joules is not None):
        return job
    grams = co2_grams(more, job.grams_per_kwh)
    return replace(
        job,
        attempt_joules=reported,
        joules=(job.joules or 0.0) + more,
        co2_grams=job.co2_grams if grams is None else (job.co2_grams or 0.0) + grams,
    )


def _with_choices(job: Job, events: Sequence[Event]) -> Job:
    """The job with the values that its ranks chose for "auto", since they are those that were
    used.
    """
    settled = next((event.settled for event in reversed(events) if event.settled), None)
    if settled is None:
        return job
    if job.stored_spec.unknown:  # what is stored of a later version's options must not get lost
        return job
    spec = job.spec
    open_options = [
        option for option in (*FITTED, COMPILE) if option in spec.chosen or is_open(spec, option)
    ]
    taken = {
        option: settled[option] for option in open_options if option in settled and option != FORMAT
    }
    if all(
        value_of(spec, option) == choice.value and spec.chosen.get(option) == choice.why
        for option, choice in taken.items()
    ):
        return job
    used = spec.model_dump(mode="json")
    for option, choice in taken.items():
        section, name = option.split(".")
        used[section][name] = choice.value
        used["chosen"][option] = choice.why
    try:
        return replace(job, stored_spec=StoredSpec.of(JobSpec.model_validate(used)))
    except ValidationError:  # a worker wrote an impossible value
        return job


def _with_sweep_course(job: Job, events: Sequence[Event]) -> Job:
    """The job with the progress by which its sweep compares it."""
    steps = [
        event.metrics for event in events if event.kind == "metrics" and event.metrics is not None
    ]
    if job.sweep_id is None or not steps:
        return job
    course = SweepJobProgress.read(job.sweep_course)
    spec = job.known_spec
    for metrics in steps:
        course = course.after(metrics, spec.rung_steps(metrics.total_steps))
    return replace(job, sweep_course=course.document())


def note_event(note: str, level: Level = "info") -> NewEvent:
    """A note of an attempt's place as an event that is stored once per attempt, however often it is
    repeated. Notes that differ only in numbers count as the same.
    """
    reason = re.sub(r"\d+", "#", note)
    return NewEvent(level=level, message=note, source=(-1 - (zlib.crc32(reason.encode()) >> 1), 0))


def _new_event(source: tuple[int, int], event: Event) -> NewEvent:
    # A checkpoint's metrics were reported with its step.
    metrics = event.metrics if event.kind == "metrics" else None
    return NewEvent(
        level=event.level,
        message=event.message,
        created_at=event.time,
        metrics=metrics,
        source=source,
    )


def _checkpoint(job: Job, event: Event) -> Checkpoint | None:
    match = CHECKPOINT_NAME.fullmatch(event.checkpoint or "")
    if event.kind != "checkpoint" or match is None:
        return None
    return Checkpoint(
        id=new_id("ftckpt_"),
        project_id=job.project_id,
        job_id=job.id,
        name=match[0],
        step=int(match[1]),
        attempt=int(match[2]),
        created_at=event.time,
        metrics=event.metrics,
    )


def result_seen(run: RunDir, seen: Observation) -> Observation:
    """The observation, except that an attempt which succeeded with an unreadable result is lost."""
    if (
        not isinstance(seen, Ended)
        or seen.exit is None
        or seen.exit.reason is not ExitReason.SUCCEEDED
    ):
        return seen
    try:
        run.read(RESULT, Result)
    except UnreadableDocumentError as error:
        return replace(seen, exit=unreadable_exit(error))
    return seen


def finished_attempt(job: Job, places: Places) -> int | None:
    """The newest attempt of a running job if it has left its result; else None.

    A result means success, whatever happened to the processes afterwards
    (ft_service/rundir/attempt_outcome.py).
    """
    if job.state is not State.RUNNING:
        return None
    try:
        result = places.run(job.id).readable(RESULT, Result)
    except (OSError, UnavailableError):  # unreachable storage must not prevent a cancel
        return None
    return job.attempt if result is not None else None


def cancel_job(store: Store, places: Places, project_id: str, job_id: str) -> Job:
    """Cancel a job. One that has left its result on the disk has succeeded and is not cancelled.

    Raises NotFoundError, and SpecError for a job that is over or has its result.
    """
    finished = finished_attempt(store.jobs.get_job(project_id, job_id), places)
    if finished is not None:
        store.leases.look_again(job_id)
    return store.jobs.request(project_id, job_id, Verb.CANCEL, succeeded=finished)


def cancel_sweep(store: Store, places: Places, project_id: str, sweep_id: str) -> Sweep:
    """Cancel the jobs of a sweep that are not over and have left no result.

    Raises NotFoundError and SpecError.
    """
    sweep_jobs = store.sweeps.jobs_of_sweeps([store.sweeps.get_sweep(project_id, sweep_id).id])[
        sweep_id
    ]
    finished = {
        job.id: attempt
        for job in sweep_jobs
        if (attempt := finished_attempt(job, places)) is not None
    }
    for job_id in finished:
        store.leases.look_again(job_id)
    return store.sweeps.cancel_sweep(project_id, sweep_id, finished)


def collect_result(run: RunDir, job: Job, places: Places) -> tuple[Job, list[File]]:
    """A succeeded job with its trained tokens, and its metrics as a file: copied to its place, for
    the caller to store.
    """
    result = run.readable(RESULT, Result)
    if result is None:
        return job, []
    job = replace(
        job,
        trained_tokens=result.trained_tokens,
        seen_tokens=max(job.seen_tokens, result.trained_tokens or 0),
    )
    metrics = run.plain(result.metrics)
    if metrics is None or not metrics.is_file():
        return job, []
    file_id = new_id("file-")
    places.files_dir.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copyfile(metrics, places.files_dir / file_id))
    places.keep(file_id)
    digest = FileDigest.of(copy)
    file = File(
        id=file_id,
        project_id=job.project_id,
        filename=RESULTS_NAME,
        purpose=RESULTS_PURPOSE,
        bytes=digest.bytes,
        sha256=digest.sha256,
        created_at=0.0,
    )
    return replace(job, result_file=file_id), [file]
