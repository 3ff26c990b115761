"""Whether a job may start here, by its plan, and what its owner is told."""

from __future__ import annotations

from typing import Literal

from ft_service.errors import SpecError
from ft_service.plan.job import Plan, plan_job
from ft_service.plan.machines import Machine, this_host
from ft_service.plan.text import bytes_text, change_text, summary
from ft_service.spec import JobSpec

Told = tuple[Literal["info", "warn"], str]


def admit(spec: JobSpec, machine: Machine | None = None) -> list[Told]:
    """Plan a job for a machine (None: this host): (level, message) of what its events begin with.

    Raises SpecError for a base that cannot be read, for patterns and names that match nothing in it, and for a job that cannot
    fit. What depends on the data (activations, logits) is an upper estimate: it warns, and refuses nothing.
    """
    plan = plan_job(spec, machine or this_host())
    _refuse_what_cannot_fit(plan)
    ways = "; ".join(change_text(change) for change in plan.changes if change.fits)
    told: Told = ("warn" if plan.fits is False else "info", f"{summary(plan)} {ways}".rstrip())
    return [told, *(("warn", warning) for warning in plan.warnings)]


def _refuse_what_cannot_fit(plan: Plan) -> None:
    if plan.stored_fits is not False:
        return
    assert plan.memory is not None, "what is not known cannot be too little"
    ways = "; ".join(change_text(change) for change in plan.changes)
    raise SpecError(
        f"The job does not fit {plan.machine}: its weights, adapters and optimizer alone take "
        f"{bytes_text(plan.rank.resident)} per rank, {bytes_text(plan.memory)} are usable. "
        f"In all it is {bytes_text(plan.rank.total)}; {ways}.",
        code="does_not_fit",
    )
