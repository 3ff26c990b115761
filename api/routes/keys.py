"""`/v1/keys`: the API keys of a project, for admin keys only; `/v1/sign_in_links`: links that sign
a browser in (`ft open`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.http.auth import Admin, Caller
from api.http.dependencies import JsonBody, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from api.wire.views import Seconds, View
from ft_service.errors import NotFoundError
from ft_service.spec import Strict
from ft_service.store.records import NewKey
from ft_service.store.tenants.keys import LINK_SECONDS

router = keyed_router("/v1", "keys")

_DAY_SECONDS = 86_400.0


class KeyRequest(Strict):
    """A new key."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    """The name in the list, such as the user's."""
    scope: Literal["admin", "submit", "user", "read", "metrics"] = "user"
    expires_days: Annotated[int, Field(ge=1, le=3650)] | None = None
    """Days until it expires; None: never."""


class KeyView(View):
    """A key without its secret."""

    id: str
    object: Literal["key"] = "key"
    name: str
    scope: str
    prefix: str
    """The key's first characters."""
    created_at: Seconds
    expires_at: Seconds | None
    last_used_at: Seconds | None
    """The last use, to the minute."""
    revoked_at: Seconds | None
    ends_with: str | None
    """Id of the key that stands for the person who made it by single sign-on, with whose access it
    ends; null: it ends by itself.
    """


class NewKeyView(KeyView):
    key: str
    """The key itself. It is shown only once."""


class KeysView(View):
    object: Literal["list"] = "list"
    data: list[KeyView]


@router.get("/keys")
def list_keys(caller: Admin, services: Svc) -> KeysView:
    """Not in OpenAI's API. List every key of the project, the oldest first, revoked and expired
    ones too.
    """
    return KeysView(
        data=[KeyView.of(key) for key in services.store.keys.list_keys(caller.project_id)]
    )


@router.post("/keys", openapi_extra=body_schema(KeyRequest))
def create(body: JsonBody, caller: Admin, services: Svc) -> NewKeyView:
    """Not in OpenAI's API. Create a key of the project."""
    given = parse_body(body, KeyRequest)
    expires_at = (
        None
        if given.expires_days is None
        else services.store.now() + given.expires_days * _DAY_SECONDS
    )
    key, secret = services.store.keys.create_key(
        NewKey(
            project_id=caller.project_id, name=given.name, scope=given.scope, expires_at=expires_at
        ),
        made_by=caller,
    )
    return NewKeyView.of(key, key=secret)


@router.delete("/keys/{key_id}")
def revoke(key_id: str, caller: Admin, services: Svc) -> KeyView:
    """Not in OpenAI's API. Revoke a key.

    The key, and every session that was opened with it, is invalid from now on.
    """
    return KeyView.of(services.store.keys.revoke_key(caller.project_id, key_id))


class SignInLinkView(View):
    object: Literal["sign_in_link"] = "sign_in_link"
    path: str
    """A path on this server, which works once. `&to=/jobs/…` leads to that page."""
    expires_at: Seconds


@router.post("/sign_in_links")
def create_link(caller: Caller, services: Svc) -> SignInLinkView:
    """Not in OpenAI's API. Create a link that signs a browser in with this key, once, within 15
    minutes.
    """
    if services.settings.page == "off":
        raise NotFoundError("This server has no page (FT_PAGE = off).", code="no_page")
    secret = services.store.sessions.new_link(caller)
    return SignInLinkView(
        path=f"/sign-in?link={secret}", expires_at=int(services.store.now() + LINK_SECONDS)
    )
