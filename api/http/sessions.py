"""Sessions of browsers: a cookie that no script reads and no other site sends, and a token on every change.

A session is opened with a key (api/routes/page/entry.py) and stands for it in every route, for as long as the key is valid,
the session lasts and nobody signs out. A changing request must name the session's token in a header: a form on another site
does not know it, and could set no header.
"""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request
from starlette.responses import Response

from api.http.key_cache import Holders
from ft_service.errors import AuthError, ForbiddenError
from ft_service.store.records import Principal
from ft_service.store.tenants.keys import SESSION_SECONDS

TOKEN_HEADER = "x-csrf-token"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def secret_of(request: Request) -> str | None:
    """The session's secret that the browser sent; None: it sent none."""
    return request.cookies.get(_cookie(request))


def token_of(secret: str) -> str:
    """What a change in a session must name. It follows from the session's secret, which scripts cannot read."""
    return hashlib.sha256(f"ft-service csrf {secret}".encode("utf-8", "surrogatepass")).hexdigest()


async def holder(request: Request, secret: str, holders: Holders) -> Principal:
    """Whose session it is. Raises AuthError for one that is over, and ForbiddenError for a change without its token."""
    principal = await holders.find_session(secret)
    if principal is None:
        raise AuthError("This session is over. Sign in again.", code="session_over")
    if request.method not in _SAFE and not _has_token(request, secret):
        message = f"{TOKEN_HEADER}: a change that a browser asks for needs its session's token. Reload the page."
        raise ForbiddenError(message, code="csrf")
    return principal


def give(request: Request, response: Response, secret: str) -> None:
    """Let the browser keep a session. `Secure` where it came by TLS, as far as a proxy says so."""
    response.set_cookie(
        _cookie(request),
        secret,
        max_age=int(SESSION_SECONDS),
        httponly=True,
        samesite="strict",
        secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto")),
    )


def take(request: Request, response: Response) -> None:
    """Let the browser forget its session."""
    response.delete_cookie(_cookie(request), httponly=True, samesite="strict")


def _has_token(request: Request, secret: str) -> bool:
    return hmac.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), token_of(secret).encode())


def _cookie(request: Request) -> str:
    # Browsers send a cookie to every port of a host, and two services of one host have each its own sessions.
    return f"ft_session_{request.url.port or 0}"
