"""A user's requests to cancel, pause or resume a job. Pure."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from ft_service.errors import SpecError
from ft_service.jobs.reasons import OF_PAUSES, Reason
from ft_service.jobs.states import TERMINAL, Job, Phase, State
from ft_service.money import money_text
from ft_service.rundir.documents import Desired


class Verb(StrEnum):
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


def request(
    job: Job,
    verb: Verb,
    now: float,
    slots: int | None = None,
    *,
    succeeded: int | None = None,
    reason: Reason | None = None,
    max_cost: int | None = None,
) -> Job:
    """The job after a user's request.

    Repeating it changes nothing. Raises SpecError on a terminal job.

    `slots`: ranks to resume with; None: as many as before. Raises SpecError if the job is not
    paused (yet). `succeeded`: an attempt whose result is on the disk though the job does not show
    it yet; None: none. A cancel is too late for it. `reason`: why the service makes the request
    itself; None: the user makes it. `max_cost`: its new limit (Job.max_cost); None: as before. A
    job that has cost as much as its limit is not resumed: SpecError.
    """
    if verb is Verb.CANCEL and job.state is State.CANCELLED:
        return job
    if verb is Verb.CANCEL and job.state is State.RUNNING and job.attempt == succeeded:
        job = replace(job, state=State.SUCCEEDED)
    if job.state in TERMINAL:
        raise SpecError(
            f"Job {job.id} has already {_ended(job.state)} and cannot be {_past(verb)}.",
            code="invalid_state",
        )
    if slots is not None and job.state is not State.PAUSED:
        if job.desired is Desired.RUN and job.slots == slots:
            return job
        raise SpecError(
            f"Job {job.id} is {job.state.value}: only a paused job can continue with another "
            "number of ranks. Pause it, and "
            "wait until it is paused.",
            param="distributed.nproc_per_node",
            code="invalid_state",
        )
    if max_cost is not None:
        job = replace(job, max_cost=max_cost)
    if verb is Verb.RESUME:
        _refuse_beyond_cost(job)
    desired = {Verb.CANCEL: Desired.CANCEL, Verb.PAUSE: Desired.PAUSE, Verb.RESUME: Desired.RUN}[
        verb
    ]
    if job.desired is desired:
        return replace(job, reason=reason) if job.reason in OF_PAUSES else job
    job = replace(job, desired=desired, generation=job.generation + 1, pending=None)
    if verb is not Verb.CANCEL and (reason is not None or job.reason in OF_PAUSES):
        job = replace(job, reason=reason)
    if slots is not None:
        # Its ranks choose again what was "auto"
        job = replace(job, slots=slots, shapes=(), share_key=None)
    if desired is Desired.CANCEL:
        phase = Phase.STOPPING if job.state is State.RUNNING else None
        return replace(
            job, state=State.CANCELLED, phase=phase, reason=Reason.USER_CANCELLED, finished_at=now
        )
    if desired is Desired.PAUSE and job.state is State.QUEUED:
        return replace(job, state=State.PAUSED)
    if desired is Desired.RUN and job.state is State.PAUSED:
        return replace(job, state=State.QUEUED, not_before=0.0, failures=0, losses=0)
    return job


def _refuse_beyond_cost(job: Job) -> None:
    if job.max_cost is None or job.cost < job.max_cost:
        return
    currency = job.currency or ""
    raise SpecError(
        f"max_cost = {money_text(job.max_cost, currency)}: the job has cost "
        f"{money_text(job.cost, currency)}. Resume it with a higher max_cost.",
        param="max_cost",
        code="cost_limit",
    )


def _ended(state: State) -> str:
    return {
        State.SUCCEEDED: "succeeded",
        State.FAILED: "failed",
        State.CANCELLED: "been cancelled",
    }[state]


def _past(verb: Verb) -> str:
    return {Verb.CANCEL: "cancelled", Verb.PAUSE: "paused", Verb.RESUME: "resumed"}[verb]
