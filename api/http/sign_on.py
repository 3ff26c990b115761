"""Cookies and addresses of single sign-on.

A browser comes back from the provider by a navigation that another site has caused, so the cookie
of a sign-in that was begun is `SameSite=Lax`, for its own path only. There is one for every
sign-in, since several tabs may begin one at once.
"""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from api.http.oidc_provider import BrowserSignIn
from api.http.sessions import came_over_tls, cookie_name
from ft_service.store.tenants.keys import SESSION_SECONDS
from ft_service.store.tenants.people import STATE_SECONDS

CALLBACK = "/sign-in/oidc/callback"
_END = "/sign-out"
_MOST_COOKIE_BYTES = 3800
"""Browsers keep cookies of up to 4096 bytes."""


def address(request: Request, path: str) -> str:
    """Return the address of a path of this service, as the browser has asked for it."""
    host = request.headers.get("host", "localhost")
    return f"{'https' if came_over_tls(request) else 'http'}://{host}{path}"


def remember(request: Request, response: Response, sign_in: BrowserSignIn) -> None:
    """Keep a sign-in in the browser while its user is at the provider."""
    name = _name(request, sign_in.state)
    secure = came_over_tls(request)
    response.set_cookie(
        name,
        sign_in.cookie,
        max_age=int(STATE_SECONDS),
        path=CALLBACK,
        httponly=True,
        samesite="lax",
        secure=secure,
    )


def begun(request: Request, state: str) -> BrowserSignIn | None:
    """Return the sign-in that the browser has begun with a state; None without one."""
    cookie = request.cookies.get(_name(request, state))
    return None if cookie is None else BrowserSignIn.of_cookie(cookie)


def forget(request: Request, response: Response, state: str) -> None:
    """Delete the cookie of a sign-in."""
    response.delete_cookie(_name(request, state), path=CALLBACK, httponly=True, samesite="lax")


def keep_id_token(request: Request, response: Response, id_token: str) -> None:
    """Keep the ID token for the provider's logout, to which it says whose session ends.

    A token that is too large for a cookie is not kept; the provider then asks.
    """
    if len(id_token) <= _MOST_COOKIE_BYTES:
        options = {
            "max_age": int(SESSION_SECONDS),
            "httponly": True,
            "secure": came_over_tls(request),
        }
        response.set_cookie(
            cookie_name(request, "id_token"), id_token, path=_END, samesite="strict", **options
        )


def id_token_of(request: Request) -> str | None:
    return request.cookies.get(cookie_name(request, "id_token"))


def forget_id_token(request: Request, response: Response) -> None:
    response.delete_cookie(
        cookie_name(request, "id_token"), path=_END, httponly=True, samesite="strict"
    )


def _name(request: Request, state: str) -> str:
    return cookie_name(
        request, f"sign_in_{''.join(letter for letter in state[:12] if letter.isalnum())}"
    )
