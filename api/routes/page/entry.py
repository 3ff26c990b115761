"""Signing in and out, and the files that pages are made of."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from api.http import sessions
from api.http.auth import authenticated
from api.http.dependencies import MAX_JSON_BYTES, Svc
from api.page.rendering import HEADERS, SignInNeeded, leave_for, page, static_answer, static_files
from ft_service.errors import AuthError, ForbiddenError, NotFoundError, SpecError
from ft_service.store.records import Principal

router = APIRouter(include_in_schema=False)

_MOST_BYTES = 4096
"""Of the form with the key."""


async def visitor(request: Request, services: Svc) -> Principal:
    """Who is signed in. Raises SignInNeeded."""
    try:
        return await authenticated(request, None, services)
    except AuthError:
        raise SignInNeeded from None


Visitor = Annotated[Principal, Depends(visitor)]


def page_router() -> APIRouter:
    """A router whose routes are for whoever is signed in; every change needs the session's token."""
    return APIRouter(include_in_schema=False, dependencies=[Depends(visitor)])


@router.get("/")
async def root(request: Request) -> Response:
    return RedirectResponse("/jobs", 303, headers=HEADERS)


@router.get("/page/static/{name}")
async def static(name: str) -> Response:
    if name not in static_files():
        raise NotFoundError(f"The page has no file {name[:80]!r}.")
    return static_answer(name)


@router.get("/sign-in")
async def sign_in_form(request: Request, link: str | None = None, to: str = "/jobs") -> Response:
    """The form. A link of `ft open` only fills it in: to follow one, which any site can have a browser do, signs nobody in."""
    template = "sign_in.html" if link is None else "sign_in_link.html"
    return page(request, template, fault=None, to=_local(to), link=link)


@router.post("/sign-in")
async def sign_in(request: Request, services: Svc) -> Response:
    """With a key, or a link that works once, in a form of this page's own."""
    _refuse_other_sites(request)
    form = await form_of(request, _MOST_BYTES)
    to = _local(form.get("to", "/jobs"))
    if link := form.get("link"):
        principal = await run_in_threadpool(services.store.follow_link, link)
        fault = "This link was used before, or is too old. `ft open` makes a new one."
    else:
        principal = await services.holders.find(form.get("key", "").strip())
        fault = "This key is not known here, has expired or was revoked."
    if principal is not None and principal.scope != "metrics":
        return await _signed_in(request, services, principal, to)
    if principal is not None:
        fault = "A key of scope metrics reads /metrics and nothing else."
    return page(request, "sign_in.html", 401, fault=fault, to=to)


@router.post("/sign-out")
async def sign_out(request: Request, services: Svc, principal: Visitor) -> Response:
    """End the session: its cookie opens nothing any more, wherever a copy of it is."""
    secret = sessions.secret_of(request)
    if secret:
        await run_in_threadpool(services.store.end_session, secret)
        services.holders.forget_session(secret)
    answer = leave_for(request, "/sign-in")
    sessions.take(request, answer)
    return answer


async def _signed_in(request: Request, services: Svc, principal: Principal, to: str) -> Response:
    secret = await run_in_threadpool(services.store.open_session, principal)
    answer = RedirectResponse(_local(to), 303, headers=HEADERS)
    sessions.give(request, answer, secret)
    return answer


def _local(path: str) -> str:
    """A path of this page, and no other site's address."""
    parts = urlsplit(path)
    safe = path.startswith("/") and not path.startswith(("//", "/\\")) and not parts.netloc and path.isprintable()
    return path if safe else "/jobs"


def _refuse_other_sites(request: Request) -> None:
    """Another site must not sign a browser in with a key of its own. Raises ForbiddenError.

    A browser names the site in one of two headers at least; what names none is not a browser.
    """
    origin, fetched_from = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if foreign or fetched_from not in ("none", "same-origin"):
        raise ForbiddenError("Sign in on the page itself.", code="csrf")


async def form_of(request: Request, most_bytes: int = MAX_JSON_BYTES) -> dict[str, str]:
    """The fields of a form. Raises SpecError if it is larger than `most_bytes`."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise SpecError(f"The form is larger than {most_bytes} bytes.", code="request_too_large")
    return dict(parse_qsl(body.decode("utf-8", "replace")))
