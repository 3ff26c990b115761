"""Sessions of browsers: a cookie that scripts cannot read and other sites cannot send, and a token
for every change.

A session is opened with a key (api/routes/page/sign_in_page.py), or by single sign-on with a
person's row among the keys (sign_on_page.py there). It has the key's rights in every route, until
the key becomes invalid, the session expires or the user signs out. A request that changes something
must send the session's token in a header:
a form on another site does not know it, and cannot set headers.
"""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request
from starlette.responses import Response

from api.http.threads import with_key
from ft_service.errors import AuthError, ForbiddenError
from ft_service.store.records import Principal
from ft_service.store.sql import Store
from ft_service.store.tenants.keys import SESSION_SECONDS
from ft_service.store.tenants.people import SIGN_ON_MARK

TOKEN_HEADER = "x-csrf-token"
OF_THE_SESSION = frozenset(
    {"/sign-out", "/project", "/v1/sign_in_links", "/v1/device_sign_ins/key"}
)
"""Paths whose POST or DELETE changes nothing but a session of the same key, which every scope
may.
"""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def secret_of(request: Request) -> str | None:
    """Return the session's secret in the browser's cookie; None without one."""
    return request.cookies.get(_cookie(request))


def token_of(secret: str) -> str:
    """Return the token of a session, derived from its secret, which scripts cannot read."""
    return hashlib.sha256(f"ft-service csrf {secret}".encode("utf-8", "surrogatepass")).hexdigest()


async def holder(request: Request, secret: str, store: Store) -> Principal:
    """Return the holder of a session.

    Raises AuthError if it is over, and ForbiddenError for a change without its token.
    """
    principal = await with_key(secret, store.sessions.session_holder)
    if principal is None:
        raise AuthError("This session is over. Sign in again.", code="session_over")
    if request.method not in _SAFE and not _has_token(request, secret):
        message = (
            f"{TOKEN_HEADER}: a change by a browser needs its session's token. Reload the page."
        )
        raise ForbiddenError(message, code="csrf")
    return principal


def set_cookie(request: Request, response: Response, secret: str) -> None:
    """Set the session's cookie, with `Secure` if the request came over TLS, also by the word of a
    proxy.
    """
    response.set_cookie(
        _cookie(request),
        secret,
        max_age=int(SESSION_SECONDS),
        httponly=True,
        samesite="strict",
        secure=came_over_tls(request),
    )


def delete_cookie(request: Request, response: Response) -> None:
    """Delete the session's cookie."""
    response.delete_cookie(_cookie(request), httponly=True, samesite="strict")


def is_of_sign_on(request: Request) -> bool:
    """Return whether the browser has, or had, a session that single sign-on has opened."""
    return (secret_of(request) or "").startswith(SIGN_ON_MARK)


def came_over_tls(request: Request) -> bool:
    """Return whether the browser uses TLS, also by the word of a proxy.

    Of several proxies in a row, each of which may add its own word, the first one speaks to the
    browser.
    """
    said = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return "https" in (request.url.scheme, said)


def cookie_name(request: Request, what: str) -> str:
    """Return the name of a cookie.  Browsers send a cookie to every port of a host; the name
    keeps two services on one host apart.
    """
    return f"ft_{what}_{request.url.port or 0}"


def _has_token(request: Request, secret: str) -> bool:
    return hmac.compare_digest(
        request.headers.get(TOKEN_HEADER, "").encode(), token_of(secret).encode()
    )


def _cookie(request: Request) -> str:
    return cookie_name(request, "session")
