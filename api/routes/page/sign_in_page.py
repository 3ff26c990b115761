"""Signing in and out, and the page's static files."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute

from api.http import sessions, sign_on
from api.http.auth import authenticated
from api.http.bodies import ArrivingBody
from api.http.dependencies import MAX_JSON_BYTES, SHORT_BYTES, Services, Svc
from api.http.origins import address_parts, other_origin
from api.http.threads import in_thread, parsed_in_turn, with_key
from api.page.inner_api import ApiError
from api.page.rendering import (
    HEADERS,
    SignInNeeded,
    leave_for,
    page,
    static_answer,
    static_files,
)
from api.wire.error_views import invalid_parameter
from ft_service.errors import AuthError, ForbiddenError, NotFoundError, SpecError
from ft_service.store.records import Principal

router = APIRouter(include_in_schema=False)

_MOST_BYTES = 4096
"""Size limit of the sign-in form."""
_MOST_FIELDS = 1000
"""Limit on the fields of any form: each is an object of its own."""


async def visitor(request: Request, services: Svc) -> Principal:
    """Return the holder of the session. Raises SignInNeeded without one."""
    try:
        return await authenticated(request, None, services)
    except AuthError:
        raise SignInNeeded from None


Visitor = Annotated[Principal, Depends(visitor)]


def page_router() -> APIRouter:
    """Return a router whose routes need a session; every change needs the session's token.

    A wrong query is refused as the API's refusals are.
    """
    return APIRouter(
        include_in_schema=False, dependencies=[Depends(visitor)], route_class=_PageRoute
    )


class _PageRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                raise ApiError(400, invalid_parameter(error)) from None

        return answer


@router.get("/")
async def root(request: Request) -> Response:
    return RedirectResponse("/jobs", 303, headers=HEADERS)


@router.get("/page/static/{name}")
async def static(name: str) -> Response:
    if name not in static_files():
        raise NotFoundError(f"The page has no file {name[:80]!r}.")
    return static_answer(name)


@router.get("/sign-in")
async def sign_in_form(
    request: Request, services: Svc, link: str | None = None, to: str = "/jobs"
) -> Response:
    """The form. A link of `ft open` only fills it in: following a link, which any site can cause,
    does not sign in.
    """
    if link is None:
        return sign_in_answer(request, services, to)
    return page(request, "sign_in_link.html", to=local_path(to), link=link)


@router.post("/sign-in")
async def sign_in(request: Request, services: Svc) -> Response:
    """Sign in with a key or a one-time link, from the page's own form."""
    _refuse_other_sites(request)
    form = await form_of(request, _MOST_BYTES)
    to = local_path(form.get("to", "/jobs"))
    if link := form.get("link"):
        principal = await in_thread(services.store.sessions.follow_link, link)
        fault = "This link was used before, or is too old. `ft open` makes a new one."
    else:
        principal = await with_key(form.get("key", "").strip(), services.store.keys.authenticate)
        fault = "This key is not known here, has expired or was revoked."
    if principal is not None and principal.scope != "metrics":
        return await _signed_in(request, services, principal, to)
    if principal is not None:
        fault = "A key of scope metrics reads /metrics and nothing else."
    return sign_in_answer(request, services, to, fault, 401)


def sign_in_answer(
    request: Request, services: Services, to: str, fault: str | None = None, status: int = 200
) -> Response:
    """Return the sign-in page. `fault`: why the last try failed."""
    provider = services.provider.name if services.provider else None
    return page(request, "sign_in.html", status, fault=fault, to=local_path(to), provider=provider)


@router.post("/sign-out")
async def sign_out(request: Request, services: Svc, principal: Visitor) -> Response:
    """End the session: its cookie and every copy of it are invalid from now on."""
    secret = sessions.secret_of(request)
    if secret:
        await in_thread(services.store.sessions.end_session, secret)
    door = None
    if services.provider and sessions.is_of_sign_on(request):
        door = await services.provider.logout_url(
            sign_on.id_token_of(request), sign_on.address(request, "/sign-in")
        )
    answer = leave_for(request, door or "/sign-in")
    sessions.delete_cookie(request, answer)
    sign_on.forget_id_token(request, answer)
    return answer


async def _signed_in(request: Request, services: Svc, principal: Principal, to: str) -> Response:
    secret = await in_thread(services.store.sessions.open_session, principal)
    answer = RedirectResponse(local_path(to), 303, headers=HEADERS)
    sessions.set_cookie(request, answer, secret)
    return answer


def local_path(path: str) -> str:
    """Return a path if it is on this page; else, such as for another site's address, the list of
    jobs.
    """
    parts = address_parts(path)
    is_local = (
        parts is not None
        and not parts.netloc
        and path.startswith("/")
        and not path.startswith(("//", "/\\"))
    )
    return path if is_local and path.isprintable() else "/jobs"


def _refuse_other_sites(request: Request) -> None:
    """Raise ForbiddenError if another site sends the form: it must not sign a browser in with its
    own key.

    A browser names the site in at least one of two headers; a client that names none is not a
    browser.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ForbiddenError("Sign in on the page itself.", code="csrf")
    if (origin := other_origin(request)) is not None:
        host = request.headers.get("host", "")
        raise ForbiddenError(
            f"Sign in on the page itself: the form is of {origin[:80]!r}, and was sent to "
            f"{host[:80]!r}. If the first is "
            "the page's address, a proxy in between has replaced the header Host: its operator "
            "has to have it pass that on.",
            code="csrf",
        )


async def form_of(request: Request, most_bytes: int = MAX_JSON_BYTES) -> dict[str, str]:
    """Return the fields of a form.

    Raises SpecError if it is larger than `most_bytes`, too slow, or has too many fields.
    """
    async with ArrivingBody(request, most_bytes).whole() as body:
        if len(body) <= SHORT_BYTES:
            return _fields(body)
        return await parsed_in_turn(_fields, body)


def _fields(body: bytearray) -> dict[str, str]:
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS))
    except ValueError:
        text = (
            f"The form has more than {_MOST_FIELDS:,} fields. Send only those that it has on "
            "the page."
        )
        raise SpecError(text, code="request_too_large") from None
