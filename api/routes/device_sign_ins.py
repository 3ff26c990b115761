"""`/v1/device_sign_ins`: sign-ins of people on the command line (`ft login`), by the OAuth 2.0
device authorization grant: the program shows a code, the person confirms it at the provider.

Only this service is the provider's client, so the program asks here, without a key. How often it
may is bounded by address and for all together, since the provider is asked each time.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field

from api.http.auth import Caller
from api.http.dependencies import Services, ShortJsonBody, Svc, body_schema, parse_body
from api.http.oidc_provider import OidcProvider
from api.http.routing import keyed_router
from api.http.threads import in_thread
from api.wire.views import Seconds, View
from ft_service.errors import ForbiddenError, LimitError, NotFoundError, SpecError
from ft_service.spec import Strict
from ft_service.store.tenants.audit import Actor, acting
from ft_service.store.tenants.keys import LOGIN_MARK
from ft_service.store.tenants.people import Login, SignOn
from ft_service.wording import counted

A_MINUTE = 600
"""Requests without a key that are answered in a minute, of all addresses together."""
OF_ADDRESS = 120
"""Of one address, which may be that of a proxy."""


class DeviceSignInView(View):
    object: Literal["device_sign_in"] = "device_sign_in"
    device_code: str
    """The program's secret, for `/v1/device_sign_ins/key`."""
    user_code: str
    """What the person types at `verification_uri`."""
    verification_uri: str
    verification_uri_complete: str | None
    """An address with the code in it; null: the provider has none."""
    expires_in: int
    """Seconds that the person has."""
    interval: int
    """Seconds between two questions for the key."""


class DeviceKeyRequest(Strict):
    """The question whether the person has confirmed a sign-in."""

    device_code: Annotated[str, Field(min_length=1, max_length=2048)]
    project: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Id of the project to work in, of those that the person's groups open; None: the one where the
    person was last.
    """


class DeviceKeyView(View):
    object: Literal["device_sign_in.key"] = "device_sign_in.key"
    status: Literal["pending", "signed_in"]
    """pending: nobody has confirmed it yet."""
    key: str | None = None
    """Opens the service as an API key does, until it expires, `ft logout` or the end of the
    person's access.
    """
    name: str | None = None
    """The person's."""
    project_id: str | None = None
    scope: str | None = None
    expires_at: Seconds | None = None


async def _in_bounds(request: Request, services: Svc) -> None:
    """Raise LimitError if too many requests without a key come."""
    address = request.client.host if request.client else ""
    for of, limit in ((f"address {address}", OF_ADDRESS), ("all", A_MINUTE)):
        rate = await services.keyless_rates.take(of, limit)
        if rate.wait:
            raise LimitError(
                f"{counted(limit, 'request')} a minute without a key are answered here, and more "
                f"have come. Try again in {rate.wait:.1f} s.",
                code="rate_limit_exceeded",
                retry_after=rate.wait,
            )


open_router = keyed_router("/v1", "keys", checked_by=_in_bounds)
router = keyed_router("/v1", "keys")


@open_router.post("/device_sign_ins")
async def begin(services: Svc) -> DeviceSignInView:
    """Not in OpenAI's API. Begin a person's sign-in on the command line (`ft login`).

    The person opens `verification_uri` in a browser, signs in at the provider and types `user_code`
    there.
    """
    begun = await _provider(services).begin_device()
    return DeviceSignInView(
        device_code=begun.device_code,
        user_code=begun.user_code,
        verification_uri=begun.address,
        verification_uri_complete=begun.complete_address,
        expires_in=begun.seconds,
        interval=begun.interval,
    )


@open_router.post("/device_sign_ins/key", openapi_extra=body_schema(DeviceKeyRequest))
async def finish(body: ShortJsonBody, request: Request, services: Svc) -> DeviceKeyView:
    """Not in OpenAI's API. Get the key of a sign-in that the person has confirmed.

    The groups at the provider say which projects it opens and with which scope, as on the page.
    """
    given = parse_body(body, DeviceKeyRequest)
    person = await _provider(services).device_signed_in(given.device_code)
    if person is None:
        return DeviceKeyView(status="pending")
    login = await _logged_in(person, given.project, request, services)
    return DeviceKeyView(
        status="signed_in",
        key=login.secret,
        name=person.name,
        project_id=login.project_id,
        scope=login.scope,
        expires_at=int(login.expires_at),
    )


@router.delete("/device_sign_ins/key", status_code=204)
def end(request: Request, caller: Caller, services: Svc) -> None:
    """Not in OpenAI's API. End the sign-in whose key this request was sent with (`ft logout`)."""
    secret = request.headers.get("authorization", "").partition(" ")[2].strip()
    if not secret.startswith(LOGIN_MARK):
        raise SpecError(
            "This request was not sent with the key of a sign-in by `ft login`. An API key is "
            "revoked by `ft keys revoke`."
        )
    services.store.sessions.end_session(secret)


async def _logged_in(
    person: SignOn, project_id: str | None, request: Request, services: Services
) -> Login:
    seconds = services.settings.oidc_session_minutes * 60.0
    with acting(Actor(None, request.client.host if request.client else None)):
        login = await in_thread(services.store.people.log_in, person, seconds, project_id)
    if login is None:
        raise ForbiddenError(
            f"{person.name}: none of your groups opens a project here. Ask whoever runs this "
            "service."
        )
    return login


def _provider(services: Services) -> OidcProvider:
    if services.provider is None:
        raise NotFoundError(
            "People do not sign in here by single sign-on (FT_OIDC_ISSUER is not set): use an API "
            "key (FT_API_KEY), which `ft keys create` makes.",
            code="no_sign_on",
        )
    return services.provider


router.routes.extend(open_router.routes)
