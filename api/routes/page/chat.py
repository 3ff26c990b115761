"""Talking to a model, or to two at once."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from api.page.inner_api import Api, InnerApi
from api.page.rendering import page
from api.routes.page.entry import page_router

router = page_router()


@router.get("/try")
async def chat(request: Request, api: Api, model: str | None = None, beside: str | None = None) -> Response:
    """A conversation; what is said is between the browser and the API."""
    found = (await api.get("/v1/models"))["data"]
    names = [one["id"] for one in found]
    for name in (model, beside):
        if name and name not in names:  # a checkpoint of a job, which is in no list; or nothing, which the API says
            names.append((await api.get(f"/v1/models/{name}"))["id"])
    chosen = model or next((one["id"] for one in found if one["parent"]), names[0] if names else None)
    values = {"names": names, "model": chosen, "beside": beside, "inference": await inference_of(api)}
    return page(request, "chat.html", **values)


async def inference_of(api: InnerApi) -> dict[str, str | None]:
    """Who answers chat completions, or why nobody does."""
    return await api.get("/v1/inference")
