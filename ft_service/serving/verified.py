"""What a job's user is told of who serves the model: an event once, and a document in the run directory."""

from __future__ import annotations

import logging

from pydantic import BaseModel

from ft_service.errors import NotFoundError
from ft_service.jobs.states import Job
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import PROBES, Probe, Probes
from ft_service.serving.verdict import Verdict
from ft_service.store.records import NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)


class Told(BaseModel):
    """The document: what the job's user was told."""

    verified: bool | None
    text: str


def read_probes(run_dir: RunDir) -> list[Probe]:
    """The trainer's log-probabilities; none of a job of a version that measured nothing."""
    found = run_dir.readable(PROBES, Probes)
    return found.probes if found is not None else []


def tell(run_dir: RunDir, key: str, store: Store, job: Job, verdict: Verdict) -> None:
    """An event of the job, unless the same was told before. `key`: of the document."""
    told = Told(verified=verdict.verified, text=verdict.text)
    before = run_dir.readable(key, Told)
    if before is not None and before.verified == told.verified:
        return
    run_dir.put(key, told.model_dump_json().encode() + b"\n")
    try:
        level = "info" if verdict.verified else "warn"
        store.tell(job, [NewEvent(level=level, message=f"{verdict.text[0].upper()}{verdict.text[1:]}.")])
    except NotFoundError:  # pruned meanwhile
        log.info("job %s is gone", job.id)
