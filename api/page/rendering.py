"""Templates, static files, and the headers with which a browser runs nothing but them."""

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

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from api.http import sessions
from api.page import words
from api.page.inner_api import ApiError

FOLDER = Path(__file__).parent
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
}
"""Of every answer of the page: no inline script or style, nothing of another origin. The others: api/http/middleware.py."""
_SEEN = f"seen-{secrets.token_hex(8)}"
"""Stands for what is known once the part is written; nobody can guess it."""
_MOST_PARTS = 2000
"""Half a megabyte for each 250."""
_parts: dict[Hashable, Markup] = {}
_FOR_EVER = "public, max-age=31536000, immutable"


class SignInNeeded(Exception):
    """Nobody is signed in, or no longer."""


def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """A whole document."""
    return HTMLResponse(_render(request, template, values), status, headers=HEADERS)


def fragment(request: Request, template: str, **values: Any) -> Response:
    """A part of a document that refreshes itself: 204, which leaves it as it is, if the browser has this very part already."""
    return sent(request, rendered(request, template, **values))


@dataclass(frozen=True)
class Part:
    """A part of a document, and what a browser says that has it."""

    body: str
    seen: str


def rendered(request: Request, template: str, **values: Any) -> Part:
    """For `sent`: to many, if nothing in it is one session's own."""
    body = _render(request, template, values | {"seen": _SEEN})
    seen = hashlib.sha256(body.encode()).hexdigest()[:16]
    return Part(body.replace(_SEEN, seen), seen)


def sent(request: Request, part: Part) -> Response:
    """The part, or 204 if the browser has it."""
    if request.query_params.get("seen") == part.seen:
        return Response(status_code=204, headers=HEADERS)
    return HTMLResponse(part.body, headers=HEADERS)


def _part(template: str, key: Hashable, **values: Any) -> Markup:
    """A template's text within another one. `key`: says all that it depends on, so that it is made once; None: made anew."""
    known = _parts.get((template, key)) if key is not None else None
    if known is not None:
        return known
    made = Markup(_environment().get_template(template).render(values))
    if key is not None:
        if len(_parts) >= _MOST_PARTS:
            _parts.clear()
        _parts[template, key] = made
    return made


def leave_for(request: Request, path: str) -> Response:
    """Send the browser to another page, after a change."""
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={**HEADERS, "hx-redirect": path})
    return RedirectResponse(path, 303, headers=HEADERS)


def to_sign_in(request: Request, error: Exception) -> Response:
    """Send a browser without a session to where one signs in."""
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={**HEADERS, "hx-redirect": "/sign-in"})
    return RedirectResponse("/sign-in", 303, headers=HEADERS)


def refusal(request: Request, error: Exception) -> Response:
    """The API's refusal as a page; as JSON to a script, which shows it where it was asked."""
    assert isinstance(error, ApiError)
    if error.status == 401:
        return to_sign_in(request, error)
    if "hx-request" in request.headers:
        return JSONResponse({"error": error.error}, error.status, headers=HEADERS)
    return page(request, "refused.html", error.status, status_code=error.status, message=error.message)


@cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Name → contents, media type, version. All that the page serves beside its documents."""
    return {path.name: _static_file(path) for path in sorted((FOLDER / "static").rglob("*")) if path.is_file()}


def static_answer(name: str) -> Response:
    """A static file; its address holds its version, so that browsers keep it."""
    contents, media_type, _ = static_files()[name]
    return Response(contents, media_type=media_type, headers={"cache-control": _FOR_EVER})


def _static_file(path: Path) -> tuple[bytes, str, str]:
    contents = path.read_bytes()
    media_type = mimetypes.guess_type(path.name)[0] or "text/plain"
    return contents, media_type, hashlib.sha256(contents).hexdigest()[:12]


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
    environment.filters.update(words.FILTERS)
    environment.globals.update(static=_static, part=_part, **words.GLOBALS)
    return environment


def _render(request: Request, template: str, values: dict[str, Any]) -> str:
    secret = sessions.secret_of(request)
    usual = {
        "path": request.url.path,
        "token_header": json.dumps({sessions.TOKEN_HEADER: sessions.token_of(secret)}) if secret else "",
        "who": getattr(request.state, "principal", None),
    }
    return _environment().get_template(template).render(usual | values)
