"""Single sign-on: to the provider and back, and the choice among the projects that a person's
groups open.
"""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from api.http import sessions, sign_on
from api.http.dependencies import Svc
from api.http.oidc_provider import BrowserSignIn
from api.http.threads import in_thread
from api.page.rendering import HEADERS, leave_for, page
from api.routes.page.sign_in_page import Visitor, form_of, local_path, page_router, sign_in_answer
from ft_service.errors import AuthError, ForbiddenError, UnavailableError
from ft_service.store.tenants.audit import Actor, acting

log = logging.getLogger(__name__)

router = APIRouter(include_in_schema=False)
signed_in_router = page_router()


@router.get("/sign-in/oidc")
async def to_provider(request: Request, services: Svc, to: str = "/jobs") -> Response:
    """Send the browser to the provider, unless another site has sent it here: that could exchange
    the session of a key.
    """
    provider = services.provider
    if provider is None or request.headers.get("sec-fetch-site", "none") not in (
        "none",
        "same-origin",
    ):
        return sign_in_answer(request, services, to)
    sign_in = BrowserSignIn.begin(local_path(to))
    try:
        there = await provider.authorization_url(
            sign_in, sign_on.address(request, sign_on.CALLBACK)
        )
    except UnavailableError as error:
        return sign_in_answer(request, services, to, str(error), 503)
    answer = RedirectResponse(there, 303, headers=HEADERS)
    sign_on.remember(request, answer, sign_in)
    return answer


@router.get(sign_on.CALLBACK)
async def from_provider(request: Request, services: Svc) -> Response:
    """Open a session for the person whom the provider has signed in."""
    state = request.query_params.get("state", "")
    sign_in = sign_on.begun(request, state)
    try:
        answer = await _signed_in(request, services, sign_in)
    except AuthError as error:
        answer = sign_in_answer(request, services, "/jobs", str(error), 401)
    except ForbiddenError as error:
        answer = sign_in_answer(request, services, "/jobs", str(error), 403)
    except UnavailableError as error:
        answer = sign_in_answer(request, services, "/jobs", str(error), 503)
    sign_on.forget(request, answer, state)
    return answer


async def _signed_in(request: Request, services: Svc, sign_in: BrowserSignIn | None) -> Response:
    """Return a page that leads on: a page and not a redirect, because browsers send no
    `SameSite=Strict` cookie with what the provider's page has caused.
    """
    provider = services.provider
    if provider is None or sign_in is None:
        raise AuthError(
            "This sign-in was not begun in this browser, or was carried out before.",
            code="sign_in_unknown",
        )
    if await in_thread(services.store.people.is_done, sign_in.state):
        raise AuthError("This sign-in was carried out before.", code="sign_in_repeated")
    found = await provider.signed_in(
        sign_in, request.query_params, sign_on.address(request, sign_on.CALLBACK)
    )
    seconds = services.settings.oidc_session_minutes * 60.0
    with acting(Actor(None, request.client.host if request.client else None)):
        secret = await in_thread(services.store.people.sign_in, found.person, seconds)
    if secret is None:
        log.warning("%s may not sign in: no group opens a project", found.person.name)
        raise ForbiddenError(
            f"{found.person.name}: none of your groups at {provider.name} opens a project here. "
            "Ask whoever runs this service."
        )
    answer = page(request, "signed_in.html", to=local_path(sign_in.to))
    sessions.set_cookie(request, answer, secret)
    sign_on.keep_id_token(request, answer, found.id_token)
    return answer


@signed_in_router.get("/project")
async def projects(request: Request, services: Svc, visitor: Visitor) -> Response:
    """The projects of a person; with a key there is one."""
    mine = {visitor.project_id: visitor.project_id}
    if visitor.identity is not None:
        mine = await in_thread(services.store.people.projects_of, visitor.identity)
    return page(request, "change_project.html", projects=mine)


@signed_in_router.post("/project")
async def change_project(request: Request, services: Svc, visitor: Visitor) -> Response:
    """Go on in another project of this person."""
    project_id = (await form_of(request)).get("project", "")
    secret = sessions.secret_of(request)
    changed = False
    if secret is not None and visitor.identity is not None:
        change = services.store.people.change_project
        changed = await in_thread(change, secret, visitor.identity, project_id)
    if not changed:
        raise ForbiddenError(f"project: your groups do not open {project_id[:80]!r}.")
    return leave_for(request, "/jobs")


router.routes.extend(signed_in_router.routes)
