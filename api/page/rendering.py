"""Templates, static files, and headers that let a browser run nothing else."""

from __future__ import annotations

import hashlib
import json
import mimetypes
import secrets
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from api.http import sessions
from api.http.origins import address_parts
from api.page import formatting
from api.page.inner_api import ApiError
from api.wire.error_views import unknown_route

FOLDER = Path(__file__).parent
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors "
    "'none'"
}
"""Headers of every answer of the page: no inline script or style, no other origin.
api/http/middleware.py adds more.
"""
_SEEN = f"seen-{secrets.token_hex(8)}"
"""Placeholder of a digest that is known only after the part is written. It cannot be guessed."""
_MOST_PARTS = 2000
"""Limit of `_parts`: half a megabyte for each 250."""
_parts: dict[Hashable, Markup] = {}
_HOME = "/jobs"
_FOR_EVER = "public, max-age=31536000, immutable"


class SignInNeeded(Exception):
    """The browser has no valid session."""


def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Return a whole document."""
    return HTMLResponse(_render(request, template, values), status, headers=HEADERS)


def fragment(request: Request, template: str, **values: Any) -> Response:
    """Return a part of a document that refreshes itself; a 204, which changes nothing, if the
    browser has the same part.
    """
    return sent(request, rendered(request, template, **values))


@dataclass(frozen=True)
class DocumentPart:
    """A part of a document, and the digest that a browser with this part sends."""

    body: str
    seen: str


def rendered(request: Request, template: str, **values: Any) -> DocumentPart:
    """Return a part for `sent`.

    Several browsers may get it if nothing in it belongs to one session.
    """
    body = _render(request, template, values | {"seen": _SEEN})
    seen = hashlib.sha256(body.encode()).hexdigest()[:16]
    return DocumentPart(body.replace(_SEEN, seen), seen)


def sent(request: Request, part: DocumentPart) -> Response:
    """Return the part, or a 204 if the browser has it."""
    if request.query_params.get("seen") == part.seen:
        return Response(status_code=204, headers=HEADERS)
    return HTMLResponse(part.body, headers=HEADERS)


def _part(template: str, key: Hashable, **values: Any) -> Markup:
    """Return a rendered template for use in another one.

    `key`: all that it depends on, for the cache; None: not cached.
    """
    cached = _parts.get((template, key)) if key is not None else None
    if cached is not None:
        return cached
    rendered = Markup(_environment().get_template(template).render(values))
    if key is not None:
        if len(_parts) >= _MOST_PARTS:
            _parts.clear()
        _parts[template, key] = rendered
    return rendered


def leave_for(request: Request, path: str) -> Response:
    """Send the browser to another page, after a change."""
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={**HEADERS, "hx-redirect": path})
    return RedirectResponse(path, 303, headers=HEADERS)


def to_sign_in(request: Request, error: Exception) -> Response:
    """Send a browser without a session to the sign-in page; one whose session single sign-on has
    opened to the provider. Both send it back to where it was.

    A browser that follows a link on another site sends no `SameSite=Strict` cookie, whether it has
    one or not: it gets a page that opens the same address again, from here.

    A client whose address lacks /v1 gets a refusal: following to a page, it would take that for the
    answer.
    """
    if _is_of_a_client(request):
        return unknown_route(request)
    of_page = "hx-request" in request.headers
    there = _where_it_was(request, of_page)
    if not of_page and _comes_from_another_site(request):
        return page(request, "again.html", to=there)
    door = "/sign-in" if there == _HOME else f"/sign-in?{urlencode({'to': there})}"
    if sessions.is_of_sign_on(request):
        door = f"/sign-in/oidc?{urlencode({'to': there})}"
    if of_page:
        return Response(status_code=401, headers={**HEADERS, "hx-redirect": door})
    return RedirectResponse(door, 303, headers=HEADERS)


def _where_it_was(request: Request, of_page: bool) -> str:
    """Return the path and the query that a browser shows; the list of jobs for what is no page.

    `of_page`: htmx asks.
    """
    parts = address_parts(
        request.headers.get("hx-current-url", "") if of_page else str(request.url)
    )
    is_page = of_page or (request.method == "GET" and not request.url.path.startswith("/page/"))
    return f"{parts.path}?{parts.query}".rstrip("?") if parts and parts.path and is_page else _HOME


def _comes_from_another_site(request: Request) -> bool:
    headers = request.headers
    is_followed = (
        headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    return (
        request.method == "GET"
        and is_followed
        and headers.get("sec-fetch-site") in ("cross-site", "same-site")
    )


def _is_of_a_client(request: Request) -> bool:
    """Return whether a program sends the request, by what no browser does: a key, and no wish for a
    page.
    """
    headers = request.headers
    return headers.get("authorization", "").lower().startswith(
        "bearer "
    ) and "text/html" not in headers.get("accept", "")


def refusal(request: Request, error: Exception) -> Response:
    """Return the API's refusal as a page; as JSON to htmx, whose script shows it."""
    assert isinstance(error, ApiError)
    if error.status == 401:
        return to_sign_in(request, error)
    if "hx-request" in request.headers:
        return JSONResponse({"error": error.error}, error.status, headers=HEADERS)
    return page(
        request, "refused.html", error.status, status_code=error.status, message=error.message
    )


@cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Return name → contents, media type and version of every static file."""
    files = {}
    for path in sorted((FOLDER / "static").rglob("*")):
        if path.is_file():
            contents = path.read_bytes()
            media_type = mimetypes.guess_type(path.name)[0] or "text/plain"
            files[path.name] = contents, media_type, hashlib.sha256(contents).hexdigest()[:12]
    return files


def static_answer(name: str) -> Response:
    """Return a static file. Its address holds its version, so browsers cache it."""
    contents, media_type, _ = static_files()[name]
    return Response(contents, media_type=media_type, headers={"cache-control": _FOR_EVER})


def _static(name: str) -> str:
    return f"/page/static/{name}?v={static_files()[name][2]}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(formatting.FILTERS)
    environment.globals.update(static=_static, part=_part, **formatting.GLOBALS)
    return environment


def _render(request: Request, template: str, values: dict[str, Any]) -> str:
    secret = sessions.secret_of(request)
    usual = {
        "path": request.url.path,
        "token_header": json.dumps({sessions.TOKEN_HEADER: sessions.token_of(secret)})
        if secret
        else "",
        "who": getattr(request.state, "principal", None),
    }
    return _environment().get_template(template).render(usual | values)
