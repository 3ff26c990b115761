"""Is the process alive, can it work, and what has it counted? Only the last needs a key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api.http.auth import may_scrape
from api.http.dependencies import Svc, binary
from api.http.metrics import exposition
from api.http.routing import ERRORS

router = APIRouter(tags=["health"], responses=ERRORS)


@router.get("/livez")
def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def ready(services: Svc) -> dict[str, str]:
    """The database answers, its schema fits, and it can be written; 503 otherwise, which says why. While only writing fails,
    reading goes on."""
    services.store.check()
    services.store.check_writable()
    return {"status": "ok"}


@router.get("/metrics", response_class=Response, responses=binary("text/plain"))
def metrics(services: Svc, allowed: Annotated[None, Depends(may_scrape)]) -> Response:
    """Numbers over all projects for Prometheus; no names and no ids of jobs, files or people. Needs a key of scope metrics or
    admin, unless the operator has set FT_METRICS_OPEN."""
    body = exposition(services.meters, services.settings, services.store)
    return Response(body, media_type=CONTENT_TYPE_LATEST)
