"""Authentication of Tinker's clients: the header `X-API-Key`, with a prefix that the client insists
on before our key.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials

from api.http.auth import authenticated
from api.http.dependencies import Svc
from api.http.routing import ERRORS, ThreadRoute
from ft_service.errors import AuthError, NotFoundError
from ft_service.store.records import Principal
from ft_service.tinker.names import KEY_PREFIX


async def client(
    request: Request, services: Svc, x_api_key: Annotated[str | None, Header()] = None
) -> Principal:
    """Return the holder of the key.

    Raises as `authenticated`, and NotFoundError if this wire is switched off.
    """
    if services.settings.tinker == "off":
        raise NotFoundError(
            "Tinker's wire is switched off on this server (FT_TINKER = off).", code="tinker_off"
        )
    key = (x_api_key or "").removeprefix(KEY_PREFIX)
    if not key:
        raise AuthError(
            f"No API key was sent. Send it as `X-API-Key: {KEY_PREFIX}<key>`; `ft keys create "
            "--tinker` prints it."
        )
    return await authenticated(
        request, HTTPAuthorizationCredentials(scheme="Bearer", credentials=key), services
    )


TinkerCaller = Annotated[Principal, Depends(client)]


def tinker_router() -> APIRouter:
    """Return a router whose routes all need a key.

    They are listed in docs/tinker.md, not in the OpenAPI document: clients come with their own
    description of them.
    """
    needed: list[Any] = [Depends(client)]
    return APIRouter(
        prefix="/api/v1",
        route_class=ThreadRoute,
        dependencies=needed,
        responses=ERRORS,
        include_in_schema=False,
    )
