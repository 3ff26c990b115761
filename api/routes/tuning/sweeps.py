"""`/v1/fine_tuning/sweeps`: jobs that differ in a few options, under one id.

Not in OpenAI's API.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Query, Request

from api.http import idempotency
from api.http.auth import Caller
from api.http.dependencies import After, JsonBody, Services, Svc, body_schema
from api.http.routing import keyed_router
from api.wire.sweep_views import DeletedSweepView, SweepView, sweep_view
from api.wire.views import ListView, list_view
from ft_service.control import sweep_loop
from ft_service.control.admission.sweep_admission import PREFIX, create_sweep
from ft_service.control.jobs import ingest
from ft_service.control.jobs.costs import costs_of
from ft_service.store.records import Sweep
from ft_service.sweeps.search_space import SweepRequest

router = keyed_router("/v1/fine_tuning/sweeps", "fine-tuning")


@router.post("", response_model=SweepView, openapi_extra=body_schema(SweepRequest))
def create(
    request: Request,
    body: JsonBody,
    caller: Caller,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Any:
    """Not in OpenAI's API. Create a sweep with all its jobs: the body of a job with `sweep` added.

    Every combination of values is checked first, and nothing is stored unless all are valid.
    """
    sweep_id = idempotency.keyed_id(PREFIX, idempotency_key, caller)
    context = services.admission(caller)

    def earlier() -> Sweep | None:
        return idempotency.earlier_sweep(services.store, caller, sweep_id, request.headers, body)

    sweep, _ = idempotency.once(
        earlier,
        lambda: create_sweep(body, context, sweep_id, idempotency.last_look(request, earlier)),
    )
    return _view(sweep, services)


@router.get("", response_model=ListView[SweepView])
def list_sweeps(
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Any:
    """Not in OpenAI's API. List sweeps, the newest first."""
    page = services.store.sweeps.list_sweeps(caller.project_id, after=after, limit=limit)
    jobs = services.store.sweeps.jobs_of_sweeps([sweep.id for sweep in page.data])
    costs = costs_of(services.store, [job for own in jobs.values() for job in own])
    views = [
        sweep_view(sweep, jobs[sweep.id], sweep_loop.best_job(jobs[sweep.id]), costs)
        for sweep in page.data
    ]
    return list_view(views, page.has_more)


@router.get("/{sweep_id}")
def retrieve(sweep_id: str, caller: Caller, services: Svc) -> SweepView:
    """Not in OpenAI's API. A sweep with its jobs, best first."""
    return _view(services.store.sweeps.get_sweep(caller.project_id, sweep_id), services)


@router.post("/{sweep_id}/cancel")
def cancel(sweep_id: str, caller: Caller, services: Svc) -> SweepView:
    """Not in OpenAI's API. Cancel all its jobs that are not over."""
    return _view(
        ingest.cancel_sweep(services.store, services.places, caller.project_id, sweep_id), services
    )


@router.delete("/{sweep_id}")
def delete(
    sweep_id: str,
    caller: Caller,
    services: Svc,
    keep_best: Annotated[bool, Query(description="Keep the tuned model of the best job.")] = False,
) -> DeletedSweepView:
    """Not in OpenAI's API. Delete a sweep that is over, with the tuned models of its jobs.

    The jobs themselves stay.
    """
    services.store.sweeps.delete_sweep(caller.project_id, sweep_id, keep_best=keep_best)
    return DeletedSweepView(id=sweep_id)


def _view(sweep: Sweep, services: Services) -> SweepView:
    jobs = services.store.sweeps.jobs_of_sweeps([sweep.id])[sweep.id]
    return sweep_view(sweep, jobs, sweep_loop.best_job(jobs), costs_of(services.store, jobs))
