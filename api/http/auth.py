"""Authentication: `Authorization: Bearer <key>`; or a browser's session, which a key has opened on the page."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.http import sessions
from api.http.dependencies import Services, Svc
from ft_service.errors import AuthError, ForbiddenError
from ft_service.store.records import Principal

bearer = HTTPBearer(auto_error=False, description="An API key of this service: `ft keys create`.")
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


async def authenticated(request: Request, credentials: _Credentials, services: Svc) -> Principal:
    """The holder of the key or session. Raises AuthError; the message never repeats the key."""
    if credentials is None and (secret := sessions.secret_of(request)) and services.settings.page == "on":
        principal = await sessions.holder(request, secret, services.holders)
    else:
        principal = await _holder(credentials, services)
    if principal.scope == "metrics":
        raise ForbiddenError("A key of scope metrics reads /metrics and nothing else.")
    request.state.principal = principal  # for the log
    return principal


async def may_scrape(credentials: _Credentials, services: Svc) -> None:
    """Raises AuthError or ForbiddenError unless /metrics is open, or the key's scope is metrics or admin."""
    if services.settings.metrics_open:
        return
    if (await _holder(credentials, services)).scope not in ("metrics", "admin"):
        message = "This needs an API key of scope metrics or admin: `ft keys create --scope metrics` makes one."
        raise ForbiddenError(message)


async def _holder(credentials: HTTPAuthorizationCredentials | None, services: Services) -> Principal:
    if credentials is None or not credentials.credentials:
        raise AuthError("No API key was sent. Send it as `Authorization: Bearer <key>`; `ft keys create` makes one.")
    principal = await services.holders.find(credentials.credentials)
    if principal is None:
        raise AuthError("This API key is not known here, has expired or was revoked.")
    return principal


async def _admin(caller: Annotated[Principal, Depends(authenticated)]) -> Principal:
    if caller.scope != "admin":
        raise ForbiddenError("This needs an API key of scope admin: `ft keys create --scope admin` makes one.")
    return caller


Caller = Annotated[Principal, Depends(authenticated)]
Admin = Annotated[Principal, Depends(_admin)]
"""A caller whose key has the scope admin; everybody else gets a ForbiddenError."""
