"""Bases and tuned models."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response

from api.page.inner_api import Api
from api.page.rendering import fragment, leave_for, page
from api.routes.page.chat import inference_of
from api.routes.page.entry import page_router

router = page_router()

_SHARES = "/v1/fine_tuning/checkpoints/{}/permissions"
Name = Annotated[str, Query(max_length=300)]


@router.get("/models")
async def models(request: Request, api: Api) -> Response:
    found = (await api.get("/v1/models"))["data"]
    tuned = [one for one in found if one["parent"]]
    by_name = {one["id"]: one for one in tuned}
    lines = {one["id"]: _lineage(one, by_name) for one in tuned}
    bases = [one for one in found if not one["parent"]]
    return page(request, "models.html", bases=bases, tuned=tuned, lines=lines, chat=await inference_of(api))


@router.get("/models/shares")
async def shares(request: Request, api: Api, name: Name) -> Response:
    found = await api.get(_SHARES.format(name), limit=100)
    return fragment(request, "model_shares.html", name=name, shares=found["data"])


@router.post("/models/verify")
async def verify(request: Request, api: Api, name: Name) -> Response:
    return fragment(request, "model_verified.html", report=await api.post(f"/v1/models/{name}/verify"))


@router.post("/models/share")
async def share(request: Request, api: Api, name: Name) -> Response:
    """With the project that the browser has asked for."""
    project = request.headers.get("hx-prompt", "").strip()
    await api.post(_SHARES.format(name), {"project_ids": [project]})
    return await shares(request, api, name)


@router.post("/models/unshare")
async def unshare(request: Request, api: Api, name: Name, share_id: str) -> Response:
    await api.delete(f"{_SHARES.format(name)}/{share_id}")
    return await shares(request, api, name)


@router.post("/models/delete")
async def delete(request: Request, api: Api, name: Name) -> Response:
    await api.delete(f"/v1/models/{name}")
    return leave_for(request, "/models")


def _lineage(model: dict[str, Any], by_name: dict[str, Any]) -> list[str]:
    """What it was trained on from, the nearest first, down to the base."""
    line: list[str] = []
    while model["parent"] and model["parent"] not in line:
        line.append(model["parent"])
        parent = by_name.get(model["parent"])
        if parent is None:
            break
        model = parent
    return line if model["root"] in line else [*line, model["root"]]
