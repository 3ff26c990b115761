"""Is the process alive, and can it work? No key needed."""

from __future__ import annotations

from fastapi import APIRouter

from api.deps import Svc

router = APIRouter(tags=["health"])


@router.get("/livez")
def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def ready(services: Svc) -> dict[str, str]:
    """The database answers and its schema fits; 503 otherwise."""
    services.store.check()
    return {"status": "ok"}
