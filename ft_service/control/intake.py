"""From a run directory into the store: what an attempt reported, and what a finished job leaves."""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from ft_service.ids import new_id
from ft_service.jobs.states import Job, Level
from ft_service.plan.choose import COMPILE, FITTED, FORMAT, is_open, value_of
from ft_service.rundir.checkpoints import CHECKPOINT_NAME
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Result
from ft_service.rundir.events import Event, read_segments
from ft_service.rundir.file_digest import FileDigest
from ft_service.spec import JobSpec, StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import Checkpoint, File, NewEvent
from ft_service.sweeps.course import Course

SEGMENTS_PER_PASS = 50
"""Bound on what one change writes; the rest follows in the next pass."""
_MOST_TOKENS = 2**62
"""What a worker reports beyond it is no count, and no database keeps it."""
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
    """What the newest attempt reported since `job.ingested`, and when its steps say that it ends. `now`: database time."""
    segments = read_segments(run, job.attempt, job.ingested, SEGMENTS_PER_PASS) if job.attempt else []
    lines = [((seq, line), event) for seq, events in segments for line, event in enumerate(events)]
    reported = [event for _, event in lines]
    return Intake(
        job=replace(_settled(_on_course(_measured(job, reported, now), reported), reported), ingested=segments[-1][0])
        if segments
        else job,
        events=[_new_event(source, event) for source, event in lines],
        checkpoints=[found for _, event in lines if (found := _checkpoint(job, event)) is not None],
        more=len(segments) == SEGMENTS_PER_PASS,
    )


def _measured(job: Job, events: Sequence[Event], now: float) -> Job:
    """The job with the tokens it has trained on and what is left of it, as its newest steps took (one step alone may have
    waited for a checkpoint)."""
    steps = [event.metrics for event in events if event.kind == "metrics" and event.metrics is not None]
    if steps:
        job = replace(
            job, seen_tokens=min(_MOST_TOKENS, max(job.seen_tokens, *(metrics.trained_tokens or 0 for metrics in steps)))
        )
    seconds = [metrics.step_seconds for metrics in steps if metrics.step_seconds is not None]
    if not seconds:
        return job
    left = max(0, steps[-1].total_steps - steps[-1].step) * median(seconds)
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
    created_at = event.time or None  # a line that is no event has no time of its own
    metrics = event.metrics if event.kind == "metrics" else None  # a checkpoint's metrics were reported with its step
    return NewEvent(level=event.level, message=event.message, created_at=created_at, metrics=metrics, source=source)


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


def collect_result(run: RunDir, job: Job, places: Places) -> tuple[Job, list[File]]:
    """A succeeded job with what it trained, and its metrics as a file: copied to its place, for the caller to store."""
    result = run.read("result.json", Result)
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
