"""`/v1/sign_in_links`: links that sign a browser in once, for whoever holds a key (`ft open`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from api.http.auth import Caller
from api.http.dependencies import Svc
from api.http.routing import keyed_router
from ft_service.errors import NotFoundError
from ft_service.store.tenants.keys import LINK_SECONDS

router = keyed_router("/v1/sign_in_links", "page")


class SignInLinkView(BaseModel):
    object: Literal["sign_in_link"] = "sign_in_link"
    path: str
    """On this server; it works once. `&to=/jobs/…` leads to that page."""
    expires_at: int


@router.post("")
def create(caller: Caller, services: Svc) -> SignInLinkView:
    """Not in OpenAI's API. A link to the page that signs a browser in with this key, once, within 15 minutes."""
    if services.settings.page == "off":
        raise NotFoundError("This server has no page (FT_PAGE = off).", code="no_page")
    secret = services.store.new_link(caller)
    return SignInLinkView(path=f"/sign-in?link={secret}", expires_at=int(services.store.now() + LINK_SECONDS))
