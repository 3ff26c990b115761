"""`/v1/keys`: the API keys of a project, for admin keys only; `/v1/sign_in_links`: links that sign a browser in (`ft open`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api.http.auth import Admin, Caller
from api.http.dependencies import JsonBody, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from ft_service.errors import NotFoundError
from ft_service.spec import Strict
from ft_service.store.records import ApiKey
from ft_service.store.tenants.keys import LINK_SECONDS

router = keyed_router("/v1", "keys")

_DAY_SECONDS = 86_400.0


class KeyRequest(Strict):
    """A new key."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    """By which it is listed, such as whose it is."""
    scope: Literal["admin", "submit", "user", "read", "metrics"] = "user"
    expires_days: Annotated[int, Field(ge=1, le=3650)] | None = None
    """Days until it expires; None: never."""


class KeyView(BaseModel):
    """A key as it may be shown again."""

    id: str
    object: Literal["key"] = "key"
    name: str
    scope: str
    prefix: str
    """Its first characters."""
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    """To the minute."""
    revoked_at: int | None


class NewKeyView(KeyView):
    key: str
    """The secret. It is shown only once."""


class KeysView(BaseModel):
    object: Literal["list"] = "list"
    data: list[KeyView]


@router.get("/keys")
def list_keys(caller: Admin, services: Svc) -> KeysView:
    """Not in OpenAI's API. Every key of the project, the oldest first, revoked and expired ones too."""
    return KeysView(data=[KeyView(**_shown(key)) for key in services.store.list_keys(caller.project_id)])


@router.post("/keys", openapi_extra=body_schema(KeyRequest))
def create(body: JsonBody, caller: Admin, services: Svc) -> NewKeyView:
    """Not in OpenAI's API. A new key of the project."""
    asked = parse_body(body, KeyRequest)
    expires_at = None if asked.expires_days is None else services.store.now() + asked.expires_days * _DAY_SECONDS
    key, secret = services.store.create_key(
        project_id=caller.project_id, name=asked.name, scope=asked.scope, expires_at=expires_at
    )
    return NewKeyView(**_shown(key), key=secret)


@router.delete("/keys/{key_id}")
def revoke(key_id: str, caller: Admin, services: Svc) -> KeyView:
    """Not in OpenAI's API. From now on the key, and every session that it has opened, opens nothing."""
    return KeyView(**_shown(services.store.revoke_key(caller.project_id, key_id)))


class SignInLinkView(BaseModel):
    object: Literal["sign_in_link"] = "sign_in_link"
    path: str
    """On this server; it works once. `&to=/jobs/…` leads to that page."""
    expires_at: int


@router.post("/sign_in_links")
def create_link(caller: Caller, services: Svc) -> SignInLinkView:
    """Not in OpenAI's API. A link to the page that signs a browser in with this key, once, within 15 minutes."""
    if services.settings.page == "off":
        raise NotFoundError("This server has no page (FT_PAGE = off).", code="no_page")
    secret = services.store.new_link(caller)
    return SignInLinkView(path=f"/sign-in?link={secret}", expires_at=int(services.store.now() + LINK_SECONDS))


def _shown(key: ApiKey) -> dict[str, Any]:
    times = ("created_at", "expires_at", "last_used_at", "revoked_at")
    whole = {name: None if (value := getattr(key, name)) is None else int(value) for name in times}
    return {"id": key.id, "name": key.name, "scope": key.scope, "prefix": key.prefix, **whole}
