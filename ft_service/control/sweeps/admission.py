"""From a create body with `sweep` to its jobs: each is checked as one alone is, and all are stored with the sweep, or none."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission import Asked, Door, Membership, door_for, new_job, read_parsed, refuse_unstorable_text
from ft_service.errors import SpecError
from ft_service.ids import new_id
from ft_service.settings import Settings
from ft_service.store.records import File, NewEvent, NewJob, Principal
from ft_service.store.sql import Store
from ft_service.store.sweeps.records import NewSweep, Sweep
from ft_service.sweeps.asked import AskedSweep, parse_sweep, values_text

PREFIX = "ftsweep-"


def create_sweep(
    body: object, *, principal: Principal, store: Store, settings: Settings, catalogue: Catalogue, sweep_id: str | None = None
) -> Sweep:
    """Check and store a sweep with all its jobs. `sweep_id`: None draws one.

    Raises SpecError with all that is wrong with any of the jobs, LimitError if not all of them may wait, ConflictError if the
    id is taken; nothing is stored then.
    """
    new, stored_as = sweep_jobs(
        body, principal=principal, store=store, settings=settings, catalogue=catalogue, sweep_id=sweep_id or new_id(PREFIX)
    )
    store.create_sweep(stored_as, new)
    return store.get_sweep(principal.project_id, stored_as.id)


def sweep_jobs(
    body: object,
    *,
    principal: Principal,
    store: Store,
    settings: Settings,
    catalogue: Catalogue,
    sweep_id: str,
    announced: Sequence[File] = (),
) -> tuple[list[NewJob], NewSweep]:
    """A sweep to store, with its jobs. `announced`: files that it names and that are not here yet. Raises SpecError as
    `create_sweep`."""
    refuse_unstorable_text(body)
    # One seed for all, so that jobs differ by what is tried and not by chance, and a validation_split is the same for each.
    seed = secrets.randbelow(2**31)
    asked = parse_sweep(body, seed)
    assert isinstance(body, dict)
    rungs = tuple(asked.settings["rungs"])
    members = [
        read_parsed(
            job.body,
            job.request,
            principal=principal,
            store=store,
            settings=settings,
            sweep=Membership(sweep_id, job.values, rungs),
        )
        for job in asked.jobs
    ]
    door = door_for(members, store=store, settings=settings, catalogue=catalogue, announced=announced)
    of_sweep = NewSweep(id=sweep_id, project_id=principal.project_id, request=body, settings=asked.settings)
    return [_told(one, asked, sweep_id) for one in _admitted(members, door)], of_sweep


def _admitted(members: list[Asked], door: Door) -> list[NewJob]:
    """The jobs. Raises SpecError with every fault once; what is no fault of the body's is raised as it is."""
    outcomes = [new_job(one, door) for one in members]
    faults: dict[str, SpecError] = {}
    for outcome in outcomes:
        if isinstance(outcome, SpecError):
            faults.setdefault(outcome.message, outcome)
        elif isinstance(outcome, Exception):
            raise outcome
    if len(faults) == 1:
        raise next(iter(faults.values()))
    if faults:
        first = next(iter(faults.values()))
        lines = [f"{len(faults)} things are wrong with the sweep's jobs.", *faults]
        raise SpecError("\n".join(lines), param=first.param, code=first.code)
    return [outcome for outcome in outcomes if isinstance(outcome, NewJob)]


def _told(new: NewJob, asked: AskedSweep, sweep_id: str) -> NewJob:
    message = f"One of the {len(asked.jobs)} jobs of sweep {sweep_id}: {values_text(new.job.sweep_values or {})}."
    return NewJob(new.job, [*new.told, NewEvent(level="info", message=message)], new.max_queued)
