"""Admission of sweeps: each job is checked like a single one, and all are stored with the sweep, or
none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from ft_service.control.admission.job_admission import (
    AdmissionContext,
    Membership,
    new_job,
    read_request,
    refuse_unstorable_text,
)
from ft_service.errors import SpecError
from ft_service.ids import new_id
from ft_service.store.records import File, NewEvent, NewJob, NewSweep, Sweep
from ft_service.sweeps.search_space import AskedSweep, parse_sweep, values_text

PREFIX = "ftsweep-"


def create_sweep(
    body: object,
    context: AdmissionContext,
    sweep_id: str | None = None,
    last_look: Callable[[], None] | None = None,
) -> Sweep:
    """Check and store a sweep with all its jobs.

    `sweep_id`: None draws one. `last_look`: as of `create_job`.

    Raises SpecError with all that is wrong with any of the jobs, LimitError if not all of them may
    wait, ConflictError if the id is taken; nothing is stored then.
    """
    jobs, sweep = sweep_jobs(body, context, sweep_id or new_id(PREFIX))
    if last_look is not None:
        last_look()
    context.store.sweeps.create_sweep(sweep, jobs)
    return context.store.sweeps.get_sweep(sweep.project_id, sweep.id)


def sweep_jobs(
    body: object, context: AdmissionContext, sweep_id: str, announced: Sequence[File] = ()
) -> tuple[list[NewJob], NewSweep]:
    """The jobs of a sweep, and the sweep, to store.

    `announced`: files that it names and that are not uploaded yet. Raises SpecError as
    `create_sweep`.
    """
    refuse_unstorable_text(body)
    # One seed for all: jobs then differ only in the values of the sweep, and share the samples of a
    # validation_split.
    seed = secrets.randbelow(2**31)
    search = parse_sweep(body, seed)
    assert isinstance(body, dict)
    rungs = tuple(search.settings["rungs"])
    members = [
        read_request(job.body, job.request, context, Membership(sweep_id, job.values, rungs))
        for job in search.jobs
    ]
    new: list[NewJob] = []
    faults: dict[str, SpecError] = {}
    for member in members:
        try:
            new.append(new_job(member, context, announced))
        except SpecError as error:
            faults.setdefault(error.message, error)
    if faults:
        raise _combined(list(faults.values()))
    sweep = NewSweep(
        id=sweep_id, project_id=context.principal.project_id, request=body, settings=search.settings
    )
    return [_with_event(job, search, sweep_id) for job in new], sweep


def _combined(faults: Sequence[SpecError]) -> SpecError:
    """One error with the messages of all errors in the jobs of a sweep."""
    first = faults[0]
    if len(faults) == 1:
        return first
    lines = [
        f"{len(faults)} things are wrong with the sweep's jobs.",
        *(fault.message for fault in faults),
    ]
    return SpecError("\n".join(lines), param=first.param, code=first.code)


def _with_event(new: NewJob, asked: AskedSweep, sweep_id: str) -> NewJob:
    message = (
        f"One of the {len(asked.jobs)} jobs of sweep {sweep_id}: "
        f"{values_text(new.job.sweep_values or {})}."
    )
    return NewJob(new.job, [*new.told, NewEvent(level="info", message=message)], new.max_queued)
