"""From a run directory into the store: what an attempt reported, what a finished job leaves, and that it has finished where
somebody cancels it."""

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
from ft_service.jobs.states import Ended, Job, Level, Observation, State
from ft_service.jobs.verbs import Verb
from ft_service.plan.choose import COMPILE, FITTED, FORMAT, is_open, value_of
from ft_service.rundir.attempt import RESULT, unreadable_exit
from ft_service.rundir.checkpoints import CHECKPOINT_NAME
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import ExitReason, Result
from ft_service.rundir.events import Event, read_segments
from ft_service.rundir.file_digest import FileDigest
from ft_service.spec import JobSpec, StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import Checkpoint, File, NewEvent
from ft_service.store.sql import Store
from ft_service.store.sweeps.records import Sweep
from ft_service.sweeps.course import Course

SEGMENTS_PER_PASS = 50
"""Bound on what one change writes; the rest follows in the next pass."""
_MOST_SECONDS = 1e9
"""That are left of a job, whatever its steps say."""
RESULTS_PURPOSE = "fine-tune-results"
RESULTS_NAME = "step_metrics.csv"


@dataclass(frozen=True)
class Intake:
    """New events of the newest attempt, ready to be written. `more`: further ones wait for the next pass."""

    job: Job
    events: list[NewEvent]
    checkpoints: list[Checkpoint]
    more: bool


def read_report(run: RunDir, job: Job, now: float) -> Intake:
    """What the newest attempt reported since `job.ingested`, and when its steps say that it ends. What lies there and is no
    event is told once an attempt. `now`: database time."""
    segments = read_segments(run, job.attempt, job.ingested, SEGMENTS_PER_PASS) if job.attempt else []
    lines = [((segment.seq, line), event) for segment in segments for line, event in enumerate(segment.events)]
    reported = [event for _, event in lines]
    faults = [note_event(segment.fault, "warn") for segment in segments if segment.fault is not None]
    seen = _settled(_on_course(_measured(job, reported, now), reported), reported)
    return Intake(
        job=replace(seen, ingested=segments[-1].seq) if segments else job,
        events=[*(_new_event(source, event) for source, event in lines), *faults],
        checkpoints=[found for _, event in lines if (found := _checkpoint(job, event)) is not None],
        more=len(segments) == SEGMENTS_PER_PASS,
    )


def _measured(job: Job, events: Sequence[Event], now: float) -> Job:
    """The job with the tokens it has trained on and what is left of it, as its newest steps took (one step alone may have
    waited for a checkpoint)."""
    steps = [event.metrics for event in events if event.kind == "metrics" and event.metrics is not None]
    if steps:
        job = replace(job, seen_tokens=max(job.seen_tokens, *(metrics.trained_tokens or 0 for metrics in steps)))
    seconds = [metrics.step_seconds for metrics in steps if metrics.step_seconds is not None]
    if not seconds:
        return job
    left = min(_MOST_SECONDS, max(0, steps[-1].total_steps - steps[-1].step) * median(seconds))
    return replace(job, left_seconds=left, ends_at=now + left)


def _settled(job: Job, events: Sequence[Event]) -> Job:
    """The job with what its ranks have chosen where its spec says "auto": they know best, and it is what was used."""
    found = next((event.settled for event in reversed(events) if event.settled), None)
    if found is None:
        return job
    spec = job.spec
    open_ones = [option for option in (*FITTED, COMPILE) if option in spec.chosen or is_open(spec, option)]
    taken = {option: found[option] for option in open_ones if option in found and option != FORMAT}
    if all(value_of(spec, option) == one.value and spec.chosen.get(option) == one.why for option, one in taken.items()):
        return job
    used = spec.model_dump(mode="json")
    for option, one in taken.items():
        section, name = option.split(".")
        used[section][name] = one.value
        used["chosen"][option] = one.why
    try:
        return replace(job, stored_spec=StoredSpec.of(JobSpec.model_validate(used)))
    except ValidationError:  # a worker wrote what no option can be
        return job


def _on_course(job: Job, events: Sequence[Event]) -> Job:
    """The job with what its sweep compares it by."""
    steps = [event.metrics for event in events if event.kind == "metrics" and event.metrics is not None]
    if job.sweep_id is None or not steps:
        return job
    course, spec = Course.read(job.sweep_course), job.spec
    for metrics in steps:
        course = course.after(metrics, spec.rung_steps(metrics.total_steps))
    return replace(job, sweep_course=course.document())


def note_event(note: str, level: Level = "info") -> NewEvent:
    """What an attempt's place says about it, as an event that is stored once an attempt, however often it is said, and with
    whatever numbers: a count or a time is no other reason."""
    reason = re.sub(r"\d+", "#", note)
    return NewEvent(level=level, message=note, source=(-1 - (zlib.crc32(reason.encode()) >> 1), 0))


def _new_event(source: tuple[int, int], event: Event) -> NewEvent:
    metrics = event.metrics if event.kind == "metrics" else None  # a checkpoint's metrics were reported with its step
    return NewEvent(level=event.level, message=event.message, created_at=event.time, metrics=metrics, source=source)


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
    """What was seen of an attempt; one that succeeded and left a result that cannot be read is lost."""
    if not isinstance(seen, Ended) or seen.exit is None or seen.exit.reason is not ExitReason.SUCCEEDED:
        return seen
    try:
        run.read(RESULT, Result)
    except UnreadableDocumentError as error:
        return replace(seen, exit=unreadable_exit(error))
    return seen


def finished_attempt(job: Job, places: Places) -> int | None:
    """The newest attempt, if it has left its result and the job is only not looked at since; None: it has not. A result means
    success, whatever became of its processes afterwards (ft_service/supervisor/verdict.py)."""
    if job.state is not State.RUNNING:
        return None
    try:
        result = places.run(job.id).readable(RESULT, Result)
    except (OSError, UnavailableError):  # out of reach: that keeps nobody from cancelling
        return None
    return job.attempt if result is not None else None


def cancel_job(store: Store, places: Places, project_id: str, job_id: str) -> Job:
    """Cancel a job. What is on the disk by now decides: one that has left its result has succeeded, and is not cancelled.

    Raises NotFoundError, and SpecError for a job that is over or has its result.
    """
    finished = finished_attempt(store.get_job(project_id, job_id), places)
    if finished is not None:
        store.look_again(job_id)
    return store.request(project_id, job_id, Verb.CANCEL, succeeded=finished)


def cancel_sweep(store: Store, places: Places, project_id: str, sweep_id: str) -> Sweep:
    """Cancel the jobs of a sweep that are not over and have not left their result. Raises NotFoundError and SpecError."""
    found = store.jobs_of_sweeps([store.get_sweep(project_id, sweep_id).id])[sweep_id]
    finished = {job.id: attempt for job in found if (attempt := finished_attempt(job, places)) is not None}
    for job_id in finished:
        store.look_again(job_id)
    return store.cancel_sweep(project_id, sweep_id, finished)


def collect_result(run: RunDir, job: Job, places: Places) -> tuple[Job, list[File]]:
    """A succeeded job with what it trained, and its metrics as a file: copied to its place, for the caller to store."""
    result = run.readable(RESULT, Result)
    if result is None:
        return job, []
    job = replace(job, trained_tokens=result.trained_tokens, seen_tokens=max(job.seen_tokens, result.trained_tokens or 0))
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
