"""Who is asking: `Authorization: Bearer <key>`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.deps import Svc
from ft_service.errors import AuthError, ForbiddenError
from ft_service.store.base import Principal

_bearer = HTTPBearer(auto_error=False, description="An API key of this service: `ft keys create`.")


def authenticated(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)], services: Svc) -> Principal:
    """The holder of the key. Raises AuthError; the message never repeats the key."""
    if credentials is None or not credentials.credentials:
        raise AuthError("No API key was sent. Send it as `Authorization: Bearer <key>`; `ft keys create` makes one.")
    principal = services.store.authenticate(credentials.credentials)
    if principal is None:
        raise AuthError("This API key is not known here, has expired or was revoked.")
    return principal


def _admin(caller: Annotated[Principal, Depends(authenticated)]) -> Principal:
    if caller.scope != "admin":
        raise ForbiddenError("This needs an API key of scope admin: `ft keys create --scope admin` makes one.")
    return caller


Caller = Annotated[Principal, Depends(authenticated)]
Admin = Annotated[Principal, Depends(_admin)]
"""A caller whose key has the scope admin; everybody else gets a ForbiddenError."""
