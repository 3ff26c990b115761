"""`/livez`, `/readyz` and `/metrics`: whether the process lives and can work, and its metrics.

Only the last needs a key. The first two answer HEAD as well, by which many monitors and load
balancers ask.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api.http.auth import may_scrape
from api.http.dependencies import Svc, binary
from api.http.prometheus import exposition
from api.http.routing import ERRORS
from ft_service.errors import UnavailableError

router = APIRouter(tags=["health"], responses=ERRORS)


@router.head("/livez", include_in_schema=False)
@router.get("/livez")
def live() -> dict[str, str]:
    """Not in OpenAI's API. The process answers."""
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
def ready(services: Svc) -> dict[str, str]:
    """Not in OpenAI's API. The database answers, has this version's schema, and can be written, and
    if this process moves jobs, it does so; otherwise a 503 says why. While only writing fails, or
    jobs do not move, requests that read still work.
    """
    services.store.check()
    services.store.check_writable()
    if services.meters.stalled:
        age = services.meters.turn_age()
        message = (
            f"Jobs do not move: the reconciler's last turn began {age:.0f} seconds ago. The "
            "service's log may say why."
        )
        raise UnavailableError(message, code="reconciler_stalled")
    return {"status": "ok"}


@router.get("/metrics", response_class=Response, responses=binary("text/plain"))
def metrics(services: Svc, allowed: Annotated[None, Depends(may_scrape)]) -> Response:
    """Not in OpenAI's API. Metrics of all projects for Prometheus, without names or ids of jobs,
    files or users. Needs a key of scope metrics or admin in the organisation FT_ORGANIZATION,
    unless the operator has set FT_METRICS_OPEN. While the database does not answer, keys are not
    known, and open metrics are those of the process and the disk, with `ft_database_up` 0.
    """
    body = exposition(services.meters, services.settings, services.statistics)
    return Response(body, media_type=CONTENT_TYPE_LATEST)
