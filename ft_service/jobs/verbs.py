"""What a user may ask of a job: cancel, pause, resume. Pure."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from ft_service.errors import SpecError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import TERMINAL, Job, Phase, State
from ft_service.rundir.documents import Desired


class Verb(StrEnum):
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


def request(job: Job, verb: Verb, now: float, slots: int | None = None, *, succeeded: int | None = None) -> Job:
    """The job after a verb of the user's. Repeating a verb changes nothing. Raises SpecError on a terminal job.

    `succeeded`: the attempt that is known to have left its result, which the job only has not heard of yet; None: none is. A
    cancel comes too late for it, as it would a moment later.
    `slots`: with a resume, ranks to go on with; None: as many as before. Raises SpecError if the job is not paused (yet).
    """
    if verb is Verb.CANCEL and job.state is State.CANCELLED:
        return job
    if verb is Verb.CANCEL and job.state is State.RUNNING and job.attempt == succeeded:
        job = replace(job, state=State.SUCCEEDED)
    if job.state in TERMINAL:
        raise SpecError(f"Job {job.id} has already {_ended(job.state)} and cannot be {_past(verb)}.", code="invalid_state")
    if slots is not None and job.state is not State.PAUSED:
        raise SpecError(
            f"Job {job.id} is {job.state.value}: only a paused job can go on with another number of ranks. Pause it, and wait "
            "until it is paused.",
            param="distributed.nproc_per_node",
            code="invalid_state",
        )
    wish = {Verb.CANCEL: Desired.CANCEL, Verb.PAUSE: Desired.PAUSE, Verb.RESUME: Desired.RUN}[verb]
    if job.desired is wish:
        return job
    job = replace(job, desired=wish, generation=job.generation + 1, pending=None)
    if slots is not None:
        job = replace(job, slots=slots, shapes=())
    if wish is Desired.CANCEL:
        phase = Phase.STOPPING if job.state is State.RUNNING else None
        return replace(job, state=State.CANCELLED, phase=phase, reason=Reason.USER_CANCELLED, finished_at=now)
    if wish is Desired.PAUSE and job.state is State.QUEUED:
        return replace(job, state=State.PAUSED)
    if wish is Desired.RUN and job.state is State.PAUSED:
        return replace(job, state=State.QUEUED, not_before=0.0, failures=0)
    return job


def _ended(state: State) -> str:
    return {State.SUCCEEDED: "succeeded", State.FAILED: "failed", State.CANCELLED: "been cancelled"}[state]


def _past(verb: Verb) -> str:
    return {Verb.CANCEL: "cancelled", Verb.PAUSE: "paused", Verb.RESUME: "resumed"}[verb]
