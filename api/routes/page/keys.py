"""The keys of a project."""

from __future__ import annotations

from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, ApiError
from api.page.rendering import page
from api.routes.page.entry import page_router

router = page_router()

_MOST_BYTES = 4096


@router.get("/keys")
async def keys(request: Request, api: Api) -> Response:
    try:
        found = await api.get("/v1/keys")
    except ApiError as error:
        if error.status != 403:
            raise
        return page(request, "keys.html", keys=None, new=None, refused=error.message)
    return page(request, "keys.html", keys=found["data"], new=None, refused=None)


@router.post("/keys")
async def create(request: Request, api: Api) -> Response:
    form = dict(parse_qsl((await request.body())[:_MOST_BYTES].decode("utf-8", "replace")))
    days = form.get("expires_days", "")
    body = {"name": form.get("name", ""), "scope": form.get("scope", "user")}
    new = await api.post("/v1/keys", body | ({"expires_days": int(days)} if days.isdecimal() else {}))
    found = await api.get("/v1/keys")
    return page(request, "keys_list.html", keys=found["data"], new=new)


@router.post("/keys/{key_id}/revoke")
async def revoke(request: Request, key_id: str, api: Api) -> Response:
    await api.delete(f"/v1/keys/{key_id}")
    found = await api.get("/v1/keys")
    return page(request, "keys_list.html", keys=found["data"], new=None)
