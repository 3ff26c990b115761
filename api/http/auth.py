"""Authentication: `Authorization: Bearer <key>`, or a browser's session, which was opened with a
key.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.http import sessions
from api.http.dependencies import Services, Svc
from api.http.threads import with_key, work_for
from ft_service.errors import AuthError, ForbiddenError, LimitError, NotFoundError
from ft_service.store.records import Principal, Project
from ft_service.store.tenants.audit import Actor, act_as
from ft_service.store.tenants.keys import LOGIN_MARK
from ft_service.store.tenants.projects import MANAGING_PROJECT
from ft_service.wording import counted

bearer = HTTPBearer(auto_error=False, description="An API key of this service: `ft keys create`.")
READING_POSTS = frozenset(
    ("/mcp", *(f"/api/v1/{name}" for name in ("get_info", "weights_info", "retrieve_future")))
)
"""Paths at which a POST changes nothing by itself: some of Tinker's wire; a tool of /mcp sends the
requests that do.
"""
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


async def authenticated(request: Request, credentials: _Credentials, services: Svc) -> Principal:
    """Return the holder of the key or session.

    Raises AuthError, whose message never repeats the key; ForbiddenError if the scope does not
    allow the request; LimitError if the project sends too many requests.
    """
    if (
        credentials is None
        and (secret := sessions.secret_of(request))
        and services.settings.page == "on"
    ):
        principal = await sessions.holder(request, secret, services.store)
    else:
        principal = await _holder(credentials, services)
    request.state.principal = principal  # for the log
    if principal.scope == "metrics":
        raise ForbiddenError("A key of scope metrics reads /metrics and nothing else.")
    if principal.limits.max_requests_per_minute is not None:
        request.state.rate = rate = await services.rates.take(
            principal.project_id, principal.limits.max_requests_per_minute
        )
        if rate.wait:
            raise LimitError(
                f"This project may send {counted(rate.limit, 'request')} a minute (its limit "
                "max_requests_per_minute). "
                f"Try again in {rate.wait:.1f} s.",
                code="rate_limit_exceeded",
                retry_after=rate.wait,
            )
    path = request.url.path
    changes = (
        request.method not in ("GET", "HEAD")
        and path not in sessions.OF_THE_SESSION
        and path not in READING_POSTS
    )
    if principal.scope == "read" and changes:
        raise ForbiddenError(
            "A key of scope read changes nothing: `ft keys create --scope submit` makes one that "
            "does."
        )
    work_for(principal.project_id)
    act_as(Actor(principal.key_id, request.client.host if request.client else None))
    return principal


async def may_scrape(credentials: _Credentials, services: Svc) -> None:
    """Raise AuthError or ForbiddenError unless /metrics is open, or the key has the scope metrics
    or admin and belongs to the organisation that runs the service: the numbers are of all
    organisations.
    """
    if services.settings.metrics_open:
        return
    holder = await _holder(credentials, services)
    if holder.scope not in ("metrics", "admin"):
        message = (
            "This needs an API key of scope metrics or admin: `ft keys create --scope "
            "metrics` makes one."
        )
        raise ForbiddenError(message)
    if holder.organization != services.settings.organization:
        raise ForbiddenError(
            "/metrics are of all organisations, and for keys of the organisation "
            f"{services.settings.organization} alone."
        )


async def _holder(
    credentials: HTTPAuthorizationCredentials | None, services: Services
) -> Principal:
    if credentials is None or not credentials.credentials:
        raise AuthError(
            "No API key was sent. Send it as `Authorization: Bearer <key>`; `ft keys create` "
            "makes one."
        )
    principal = await with_key(credentials.credentials, services.store.keys.authenticate)
    if principal is None and credentials.credentials.startswith(LOGIN_MARK):
        raise AuthError("This sign-in is over: `ft login` begins another.", code="session_over")
    if principal is None:
        raise AuthError("This API key is not known here, has expired or was revoked.")
    return principal


async def _admin(caller: Annotated[Principal, Depends(authenticated)]) -> Principal:
    if caller.scope != "admin":
        raise ForbiddenError(
            "This needs an API key of scope admin: `ft keys create --scope admin` makes one."
        )
    return caller


Caller = Annotated[Principal, Depends(authenticated)]
Admin = Annotated[Principal, Depends(_admin)]
"""A caller whose key has the scope admin; any other gets a ForbiddenError."""


def manages(caller: Principal) -> bool:
    """Return whether a caller manages the other projects of its organisation: with an admin key of
    the first project.
    """
    return caller.scope == "admin" and caller.project_id == MANAGING_PROJECT


def operates(caller: Principal, services: Services) -> bool:
    """Return whether a caller may change what all organisations share: with an admin key of the
    first project, if that is of the organisation that runs the service.
    """
    return manages(caller) and caller.organization == services.settings.organization


async def _operator(caller: Admin, services: Svc) -> Principal:
    if not operates(caller, services):
        raise ForbiddenError(
            "This changes what all projects share, and is for whoever runs the service: an API key "
            f"of scope admin of the project {MANAGING_PROJECT}."
        )
    return caller


Operator = Annotated[Principal, Depends(_operator)]
"""A caller that `operates`; any other gets a ForbiddenError."""


def known_project(project_id: str, caller: Principal, services: Services) -> Project:
    """Return a project that the caller may see: its own, and with a managing key every project of
    its organisation. Raises NotFoundError for any other, whether it exists or not.
    """
    if project_id == caller.project_id:
        return services.store.projects.get_project(project_id)
    missing = NotFoundError(f"There is no project {project_id[:80]!r} in this organisation.")
    if not manages(caller):
        raise missing
    try:
        project = services.store.projects.get_project(project_id)
    except NotFoundError:
        raise missing from None
    if project.organization != caller.organization:
        raise missing
    return project
